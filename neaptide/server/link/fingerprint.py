"""Which model is served: a name says little, since another model may come under the same name."""

import hashlib
from pathlib import Path

_DESCRIPTIONS = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


def model_fingerprint(directory: Path) -> str:
    """A hash of what decides over answers: configuration, tokenizer, template and weights.

    Of the weights it reads sizes and 64 samples of each file, among them the header, so that it takes milliseconds:
    fine-tuning moves all weights, and a copy of the same model has the same fingerprint.

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
