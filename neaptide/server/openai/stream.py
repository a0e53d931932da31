"""Chunks of a streamed reply."""

from typing import Any

from neaptide.server.openai.respond import Delta, ResponseAssembler, shape_logprobs
from neaptide.server.openai.tool_calls import ToolCall


class ChunkShaper:
    """Turns the deltas of one request into chunk objects, all with the same id."""

    def __init__(self, assembler: ResponseAssembler, response_id: str) -> None:
        self._assembler = assembler
        self._prepared = assembler.prepared
        self._greeted = [False] * self._prepared.num_choices
        self._num_calls = [0] * self._prepared.num_choices
        self._head: dict[str, Any] = {
            "id": response_id,
            "object": "chat.completion.chunk" if self._prepared.is_chat else "text_completion",
            "created": self._prepared.created,
            "model": self._prepared.model,
            "service_tier": self._prepared.service_tier,
            "system_fingerprint": self._prepared.context.system_fingerprint,
        }

    def shape(self, delta: Delta) -> list[dict[str, Any]]:
        """Zero or more chunks: text that is held back gives none, unless its tokens are asked for."""
        return self._chat(delta) if self._prepared.is_chat else self._completion(delta)

    def usage(self, metrics: dict[str, float]) -> dict[str, Any]:
        """The extra chunk at the end of a stream with ``include_usage``."""
        return {**self._head, "choices": [], "usage": self._assembler.usage(), "metrics": metrics}

    def _chat(self, delta: Delta) -> list[dict[str, Any]]:
        chunks = []
        if not self._greeted[delta.choice]:
            self._greeted[delta.choice] = True
            chunks.append(self._chunk(delta.choice, {"delta": {"role": "assistant", "content": ""}, "logprobs": None}))
        if delta.text or delta.tokens:
            logprobs = shape_logprobs(self._prepared, delta.tokens)
            chunks.append(self._chunk(delta.choice, {"delta": {"content": delta.text}, "logprobs": logprobs}))
        for call in delta.calls:
            chunks += self._call(delta.choice, call)
        if delta.finish_reason is not None:
            chunks.append(self._chunk(delta.choice, {"delta": {}, "logprobs": None}, delta))
        return chunks

    def _call(self, choice: int, call: ToolCall) -> list[dict[str, Any]]:
        """First which function, then its arguments: readers put the pieces together by index."""
        index = self._num_calls[choice]
        self._num_calls[choice] += 1
        head = {**call.as_message_part(), "function": {"name": call.name, "arguments": ""}}
        pieces = ({"index": index, **head}, {"index": index, "function": {"arguments": call.arguments}})
        return [self._chunk(choice, {"delta": {"tool_calls": [piece]}, "logprobs": None}) for piece in pieces]

    def _completion(self, delta: Delta) -> list[dict[str, Any]]:
        if not (delta.text or delta.tokens or delta.finish_reason):
            return []
        logprobs = shape_logprobs(self._prepared, delta.tokens)
        return [self._chunk(delta.choice, {"text": delta.text, "logprobs": logprobs}, delta)]

    def _chunk(self, index: int, content: dict[str, Any], end: Delta | None = None) -> dict[str, Any]:
        choice = {"index": index, **content, "finish_reason": end.finish_reason if end else None}
        if end is not None and end.finish_reason is not None:
            choice["stop_reason"] = end.stop_reason
        chunk = {**self._head, "choices": [choice]}
        if self._prepared.continuous_usage:
            chunk["usage"] = self._assembler.usage()
        elif self._prepared.include_usage:
            chunk["usage"] = None
        return chunk
