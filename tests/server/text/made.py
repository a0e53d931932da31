"""Model directories with the embedded model's tokenizer, changed as a test needs it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from neaptide.server.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL_DIR


def write_tokenizer(
    directory: Path,
    template: Any,
    change: Callable[[dict[str, Any]], None] = lambda spec: None,
    **config: Any,
) -> Path:
    """The directory with a tokenizer, whose ``tokenizer.json`` was changed and whose configuration has these
    entries."""
    spec = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    change(spec)
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    entries = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "chat_template": template, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(entries))
    shutil.copy(MODEL_DIR / "config.json", directory)
    return directory


def made_tokenizer(directory: Path, template: Any, *args: Any, **config: Any) -> Tokenizer:
    return Tokenizer(write_tokenizer(directory, template, *args, **config))
