"""Fingerprint of the served model, because another model may have the same name."""

import hashlib
from pathlib import Path

_DESCRIPTIONS = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


def model_fingerprint(directory: Path) -> str:
    """Hash of everything that affects answers: configuration, tokenizer, template and weights.

    Of the weights it reads sizes and 64 samples per file, including the header, which takes milliseconds. Fine-tuning
    changes all weights, and a copy of a model has the same fingerprint.

    Raises:
        OSError: a file cannot be read.
    """
    found = hashlib.sha256()
    for path in [directory / name for name in _DESCRIPTIONS] + sorted(directory.glob("*.safetensors")):
        if not path.is_file():
            continue
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as f:
            if path.suffix != ".safetensors":
                found.update(f.read())
                continue
            for sample in range(_NUM_SAMPLES):
                f.seek(size * sample // _NUM_SAMPLES)
                found.update(f.read(_SAMPLE_BYTES))
    return found.hexdigest()
