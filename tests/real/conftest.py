"""A model that people really use, behind the real server: ``make test-real``.

Without the model's files everything here is skipped. ``make test`` runs only the chats.
"""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.server import RunningServer
from tools.real_model import is_at_hand, real_model_path

NAME = "smollm2"
TTFT_SLO_S, TPOT_SLO_S = 1.0, 0.1


@pytest.fixture(scope="session")
def model() -> Path:
    if not is_at_hand():
        pytest.skip(f"no model in {real_model_path()}: run `make real-model`")
    return real_model_path()


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """In float32, so that its answers compare with a reference."""
    # A profile of the same shape: else the server would measure itself first.
    flags = ["--served-model-name", NAME, "--dtype", "float32", "--profile", "cpu-111m"]
    flags += ["--ttft-slo-ms", str(TTFT_SLO_S * 1e3), "--tpot-slo-ms", str(TPOT_SLO_S * 1e3)]
    with RunningServer(tmp_path_factory.mktemp("real"), str(model), *flags) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client
