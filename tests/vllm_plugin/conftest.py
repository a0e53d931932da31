import logging
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.conftest import KEYS
from tests.e2e.server import RunningServer
from tests.vllm_plugin.server import VllmServer

collect_ignore = ["inside"]
"""What imports vLLM: ``test_inside.py`` runs it in vLLM's interpreter."""


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """The plug-in gives our loggers vLLM's handlers, in a process of its own. Here other tests come after it."""
    loggers = [logging.getLogger(name) for name in ("neaptide", "neaptide_vllm")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The embedded model behind ``vllm serve``, for tests that have it behind our server elsewhere."""
    flags = ("--api-key", *KEYS, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with VllmServer(tmp_path_factory.mktemp("vllm"), *flags) as server:
        server.http.headers["Authorization"] = f"Bearer {KEYS[0]}"
        yield server


@pytest.fixture(scope="session")
def client(embedded: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=embedded.base_url, api_key=KEYS[0], max_retries=0) as client:
        yield client
