"""The ``llm`` command line."""

from pathlib import Path

import pytest

from tests.clients.environment import ClientEnvironment
from tests.e2e.server import RunningServer

LLM = ClientEnvironment("llm")
MODELS = """
- model_id: local-tiny
  model_name: neaptide-tiny
  api_base: {base_url}
"""
pytestmark = LLM.marks


@pytest.mark.parametrize("flags", [(), ("--no-stream",)], ids=["stream", "whole"])
def test_prompt_is_answered_with_usage(server: RunningServer, tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(base_url=server.base_url))
    options = ["-m", "local-tiny", "-o", "temperature", "0", "-o", "max_tokens", "64", "--key", "none", "-u", *flags]
    done = LLM.run("llm", *options, "What is 21 + 34?", env={"LLM_USER_PATH": str(tmp_path)})
    assert done.stdout == "1+4=5, 2+3=5 so 55\n"
    assert "15 input, 16 output" in done.stderr
