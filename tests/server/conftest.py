"""The whole HTTP layer in one process: real app, real client, fake engine."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import httpx2
import openai
import pytest
from fastapi import FastAPI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import TypeAdapter

from neaptide.server.app import ServerState, ServingContext, create_app
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.http.auth import KeyRing
from neaptide.server.text.rendering import OwnRenderer
from neaptide.server.text.tokenizer import Tokenizer
from tests.patience import PATIENCE_S
from tests.server.engine_client.loop_clock import LoopClock
from tests.server.fake_engine import FakeEngine

MODEL_DIR = Path(str(files("neaptide.data"))) / "neaptide-tiny"
MODEL_ID = "org/neaptide-tiny"


@pytest.fixture(scope="session", autouse=True)
def patient_with_grammars() -> Iterator[None]:
    """Who asks a machine that is too busy to check a grammar gets a 503, which is none of the answers that tests look
    at. The processor time that a grammar may take is as ever."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("neaptide.server.structured.checker.WALL_S", PATIENCE_S)
        yield


@pytest.fixture(scope="session", autouse=True)
def forms_of_replies() -> Iterator[None]:
    """What an app is slow to make are pydantic's forms of what its routes take and give: made once for all apps."""
    made: dict[Any, TypeAdapter[Any]] = {}

    def form_of(annotated: Any, **config: Any) -> TypeAdapter[Any]:
        annotation, *more = get_args(annotated)
        key = annotation, repr(more), repr(config)
        if key not in made:
            made[key] = TypeAdapter(annotated, **config)
        return made[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fastapi._compat.v2.TypeAdapter", form_of)
        yield


@pytest.fixture(scope="session", autouse=True)
def templates_are_rendered_here() -> Iterator[None]:
    """A process for each model that a test starts would cost half a second; ``test_rendering`` has its own."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("neaptide.server.text.tokenizer.ChildRenderer", OwnRenderer)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(MODEL_DIR)


@dataclass
class Server:
    """A running app and the ways to reach it."""

    app: FastAPI
    context: ServingContext
    engine: FakeEngine
    http: httpx2.AsyncClient
    openai: openai.AsyncOpenAI


def make_context(tokenizer: Tokenizer, client: EngineClient | None = None, max_model_len: int = 8192) -> ServingContext:
    return ServingContext(
        model_id=MODEL_ID,
        tokenizer=tokenizer,
        client=client or EngineClient(),
        created=1_700_000_000,
        max_model_len=max_model_len,
        vocab_size=416,
        eos_token_ids=(5,),
        ttft_slo_s=30.0,
        tpot_slo_s=30.0,
    )


def make_server(tokenizer: Tokenizer, keys: tuple[str, ...] = ()) -> Server:
    client = EngineClient()
    context = make_context(tokenizer, client)
    engine = FakeEngine(client)
    engine.attach()
    app = create_app(ServerState(context=context, keys=KeyRing(keys)))
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    http = httpx2.AsyncClient(transport=transport, base_url="http://test")
    sdk = openai.AsyncOpenAI(base_url="http://test/v1", api_key="EMPTY", http_client=http, max_retries=0)
    return Server(app, context, engine, http, sdk)


@pytest.fixture
async def server(tokenizer: Tokenizer) -> AsyncIterator[Server]:
    built = make_server(tokenizer)
    yield built
    await built.openai.close()


@pytest.fixture
async def loop_clock() -> LoopClock:
    """To turn the clock of the test's own loop."""
    return LoopClock(asyncio.get_running_loop())


USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is 2+2?"}]
