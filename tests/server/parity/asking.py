"""Sends a field to the server and sees what comes of it: a pair of requests, one of them with the field."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from neaptide.server.app import ServerState, create_app
from neaptide.server.batches.lines import ContextCompiler
from neaptide.server.batches.service import BatchService
from neaptide.server.batches.wiring import BatchSettings
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.parsers.choose import choose_parsers
from neaptide.server.routes.batches import batches_router
from neaptide.server.routes.files import files_router
from neaptide.server.text.chat_template import DEFAULT
from neaptide.server.text.tokenizer import Tokenizer
from tests.server.batches.fakes import ThreadChecker
from tests.server.conftest import MODEL_DIR, make_context
from tests.server.fake_engine import FakeEngine

ALIAS = "another-name"
OTHER_TEMPLATE = "other"
THOUGHT, ANSWER = "<think>\nHm.\n</think>\n\n", "Yes<|user|>no."
_VARIABLES = ("tools", "documents", "add_generation_prompt", "reasoning_effort", "mood")
TEMPLATE = "{{ messages | tojson }}" + "".join(f"{{{{ {name} | tojson if {name} is defined }}}}" for name in _VARIABLES)
"""Shows the model all that a chat template can see."""
_OF_THE_MOMENT = frozenset(
    {"id", "call_id", "item_id", "created", "created_at", "completed_at", "metrics", "request_id", "arrival_s"}
)


class Outcome(StrEnum):
    """What comes of a field."""

    TAKEN = "taken"
    """It changes what is run or what is returned."""
    IGNORED = "ignored"
    REFUSED = "refused"
    """It is answered 400, and the error names it."""


class Asking:
    """A server of a model with a scripted answer, with files and batches."""

    def __init__(self, http: httpx2.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer) -> None:
        self.http = http
        self._engine = engine
        self._tokenizer = tokenizer

    def say(self, text: str) -> None:
        """Sets what the model answers from now on."""
        self._engine.script = self._tokenizer.encode(text)

    async def outcome(
        self,
        call: str,
        field: str,
        plain: Mapping[str, Any],
        asked: Mapping[str, Any],
        wrong: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """What comes of the field in ``asked``, against the request ``plain``.

        A field without which nothing works is taken, and one whose wrong value is refused.

        Raises:
            AssertionError: the replies show neither.
        """
        before, after = await self._observed(call, plain), await self._observed(call, asked)
        if after["status"] != 200:
            error = after["reply"][0]["error"]
            assert after["status"] == 400, (field, error)
            assert (error["param"] or "").startswith(field), (field, error)
            return Outcome.REFUSED
        assert before["status"] == 200 or before["reply"][0]["error"]["param"] == field, (field, before["reply"])
        if wrong is not None:
            assert await self.outcome(call, field, plain, wrong) is Outcome.REFUSED
            return Outcome.TAKEN
        return Outcome.IGNORED if before == after else Outcome.TAKEN

    async def _observed(self, call: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """A reply, and what the engine was asked for, without what differs each time."""
        num_before = len(self._engine.requests)
        reply = await self._sent(call, fields)
        texts = [reply.text]
        if reply.headers["content-type"].startswith("text/event-stream"):
            texts = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
        requests = [msgspec.structs.asdict(request) for request in self._engine.requests[num_before:]]
        return {
            "status": reply.status_code,
            "reply": _kept([json.loads(text) for text in texts]),
            "requests": _kept(requests),
        }

    async def _sent(self, call: str, fields: Mapping[str, Any]) -> httpx2.Response:
        method, _, path = call.rpartition(" ")
        if method == "GET":
            return await self.http.get(path, params=dict(fields))
        if path == "/v1/files":
            form = {name: value for name, value in fields.items() if name != "file"}
            files = {"file": fields["file"]} if "file" in fields else {"none": b""}
            return await self.http.post(path, data=form, files=files)
        return await self.http.post(path, json=dict(fields))


def _kept(node: Any) -> Any:
    if isinstance(node, list):
        return [_kept(child) for child in node]
    if not isinstance(node, dict):
        return node
    kept = {key: _kept(child) for key, child in node.items() if key not in _OF_THE_MOMENT}
    if "created_at" in node and node.get("expires_at"):
        kept["expires_at"] = node["expires_at"] - node["created_at"]
    return kept


def _begins_prompts(token_id: int, text: str) -> dict[str, Any]:
    """The part of ``tokenizer.json`` that puts a token in front of a prompt."""
    single = [{"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {text: {"id": text, "ids": [token_id], "tokens": [text]}}
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": tokens}


@asynccontextmanager
async def asking(directory: Path) -> AsyncIterator[Asking]:
    """Serves such a model; its files stand in the directory."""
    model = directory / "model"
    model.mkdir()
    words = json.loads((MODEL_DIR / "tokenizer.json").read_text()) | {"post_processor": _begins_prompts(1, "<|bos|>")}
    (model / "tokenizer.json").write_text(json.dumps(words))
    config = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    templates = [{"name": name, "template": text} for name, text in ((DEFAULT, TEMPLATE), (OTHER_TEMPLATE, "Hi."))]
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": templates}))
    tokenizer, client = Tokenizer(model), EngineClient()
    context = make_context(tokenizer, client)
    context.model_aliases = (ALIAS,)
    context.parsers = choose_parsers("hermes", "qwen3", None, ())
    engine = FakeEngine(client)
    engine.attach()
    compiler = ContextCompiler(context)
    service = BatchService(BatchSettings(data_dir=directory / "data"), client, compiler, ThreadChecker(compiler))
    app = create_app(
        ServerState(context=context, batches=service),
        extra_routers=(files_router(service), batches_router(service)),
    )
    await service.start()
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    try:
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
            yield Asking(http, engine, tokenizer)
    finally:
        await service.stop()
        context.grammars.close()
