"""A scripted checkpoint: it says what a script has, as a model that reasons and calls tools would write it."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from neaptide.launch.serve import embedded_model_path


def make_model(directory: Path, script: Sequence[Mapping[str, str]]) -> Path:
    """The embedded model's tokenizer with reasoning marks as special tokens, a template that opens reasoning, a script
    for weights."""
    directory.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(embedded_model_path() / name, directory)
    tokenizer = json.loads((embedded_model_path() / "tokenizer.json").read_text())
    first = max(token["id"] for token in tokenizer["added_tokens"]) + 1
    plain = set(tokenizer["model"]["vocab"].values())
    free = [number for number in range(first, 416 + 2) if number not in plain][:2]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [
        {"id": number, "content": text, **flags} for number, text in zip(free, ("<think>", "</think>"), strict=True)
    ]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": 418}))
    template = (embedded_model_path() / "chat_template.jinja").read_text()
    thoughts = "('<think>' + message.reasoning_content + '</think>' if message.reasoning_content else '')"
    template = template.replace("+ '|>' +", f"+ '|>' + {thoughts} +", 1)
    template = template.replace("'<|assistant|>'", "'<|assistant|><think>'", 1)
    (directory / "chat_template.jinja").write_text(template)
    (directory / "script.json").write_text(json.dumps(script))
    return directory
