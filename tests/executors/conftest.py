from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from tests.executors.driver import write_checkpoint


@pytest.fixture(scope="session")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    """Six heads over two KV heads, untied."""
    directory = tmp_path_factory.mktemp("gqa")
    return directory, write_checkpoint(directory)
