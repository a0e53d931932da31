"""One reply of eight cannot be assembled: it fails, the others are what they are without it."""

import asyncio
from typing import Any

import pytest

from neaptide.server.openai.respond import ChoiceAssembler
from tests.server.conftest import MODEL_ID, Server

POISON_ID = 66


def _body(index: int, stream: bool) -> dict[str, Any]:
    stop_token_ids = [POISON_ID] if index == 3 else []
    messages = [{"role": "user", "content": f"number {index}"}]
    return {
        "model": MODEL_ID,
        "messages": messages,
        "seed": index,
        "stop_token_ids": stop_token_ids,
        "max_tokens": 20,
    } | {"stream": stream}


@pytest.mark.acceptance("A4", "one reply of eight whose detokenizer raises", count=2)
@pytest.mark.parametrize("stream", [False, True])
async def test_only_the_reply_that_cannot_be_assembled_fails(
    server: Server, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    take_tokens = ChoiceAssembler._take_tokens

    def poisoned(self: ChoiceAssembler, *args: Any) -> None:
        if self._form.stop_token_ids == (POISON_ID,) and self.num_tokens >= 5:
            raise RuntimeError("poisoned")
        take_tokens(self, *args)

    async def ask(index: int) -> Any:
        return await server.http.post("/v1/chat/completions", json=_body(index, stream))

    alone = [(await ask(i)).text for i in range(8)]
    monkeypatch.setattr(ChoiceAssembler, "_take_tokens", poisoned)
    replies = await asyncio.gather(*map(ask, range(8)))
    for index, reply in enumerate(replies):
        if index != 3:
            assert _text(reply.text) == _text(alone[index])
    assert "internal_error" in replies[3].text
    assert replies[3].status_code == (200 if stream else 500)
    assert server.context.client.num_in_flight == 0
    assert [reason.name for _, reason in server.engine.aborts] == ["ABORT"]


def _text(reply: str) -> list[str]:
    """The reply without what differs from one call to the next."""
    return [part for part in reply.replace("}", ",").split(",") if '"content"' in part or '"finish_reason"' in part]
