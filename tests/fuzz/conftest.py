from collections.abc import Iterator
from pathlib import Path

import pytest

from neaptide.server.text.tokenizer import Tokenizer
from tests.fuzz.app import FuzzedApp, fuzzed_app
from tests.server.conftest import MODEL_DIR


@pytest.fixture
def fuzzed(tmp_path: Path) -> Iterator[FuzzedApp]:
    with fuzzed_app(tmp_path, Tokenizer(MODEL_DIR)) as app:
        yield app
