"""Chunks of a streamed reply."""

import uuid
from collections.abc import Sequence

from neaptide.server.http.sse import event, json_of
from neaptide.server.openai.prepare import Prepared
from neaptide.server.openai.replies import (
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    Chunk,
    CompletionChunk,
    CompletionChunkChoice,
    FunctionDelta,
    RequestMetrics,
    ToolCallDelta,
)
from neaptide.server.openai.respond import (
    Delta,
    ResponseAssembler,
    shape_chat_logprobs,
    shape_completion_logprobs,
)
from neaptide.server.parsers.calls import CallPiece


class ChunkShaper:
    """Converts the deltas of one request to chunks with a common id."""

    def __init__(self, assembler: ResponseAssembler, prepared: Prepared, response_id: str) -> None:
        self._assembler = assembler
        self._prepared = prepared
        self._reply, self._form = assembler.reply, assembler.reply.form
        self._greeted = [False] * prepared.num_choices
        self._around_text: dict[tuple[int, bool], tuple[bytes, bytes]] = {}
        """Bytes before and after the text of an event, by choice and whether it is text or reasoning."""
        self._head: Chunk = {
            "id": response_id,
            "created": self._reply.created,
            "model": self._form.model,
            "service_tier": self._form.service_tier,
            "system_fingerprint": self._reply.context.system_fingerprint,
        }

    def encode(self, delta: Delta) -> bytes:
        """Events of a delta. Those of text alone, which are most, are encoded but for their text only once."""
        text = delta.text or delta.reasoning
        if not text or not self._is_text_alone(delta):
            return b"".join(event(chunk) for chunk in self.shape(delta))
        kind = (delta.choice, bool(delta.text))
        if kind not in self._around_text:
            # A mark that nothing else has is where the text goes.
            mark = uuid.uuid4().hex
            marked = Delta(delta.choice, text=mark) if delta.text else Delta(delta.choice, reasoning=mark)
            (chunk,) = self.shape(marked)
            before, _, after = event(chunk).partition(json_of(mark))
            self._around_text[kind] = before, after
        before, after = self._around_text[kind]
        return before + json_of(text) + after

    def _is_text_alone(self, delta: Delta) -> bool:
        """Whether the delta has one chunk, with text or reasoning that has no log-probabilities."""
        if delta.finish_reason is not None or delta.tokens or delta.calls or self._prepared.continuous_usage:
            return False
        if not self._form.is_chat:
            return not self._form.wants_logprobs
        is_one = not (delta.text and delta.reasoning) and self._greeted[delta.choice]
        return is_one and not (delta.text and self._form.wants_logprobs)

    def shape(self, delta: Delta) -> Sequence[ChatCompletionChunk | CompletionChunk]:
        """Chunks of a delta, perhaps none: text that is held back has no chunk unless its tokens are requested."""
        return self._chat(delta) if self._form.is_chat else self._completion(delta)

    def end(self, metrics: RequestMetrics) -> bytes:
        """The extra event at the end of a stream with ``include_usage``; empty without."""
        if not self._prepared.include_usage:
            return b""
        chunk: Chunk = {**self._head, "usage": self._assembler.usage(), "metrics": metrics}
        return event(_chat_chunk(chunk, []) if self._form.is_chat else _completion_chunk(chunk, []))

    def _chat(self, delta: Delta) -> list[ChatCompletionChunk]:
        deltas: list[tuple[ChatDelta, ChatLogprobs | None]] = []
        if not self._greeted[delta.choice]:
            self._greeted[delta.choice] = True
            # Null where the reply may be calls alone, as in a reply that is not streamed.
            deltas.append(({"role": "assistant", "content": None if self._form.tools else ""}, None))
        if delta.reasoning:
            deltas.append(({"reasoning_content": delta.reasoning}, None))
        if delta.text or delta.tokens:
            deltas.append(({"content": delta.text}, shape_chat_logprobs(self._reply, delta.tokens)))
        deltas += [({"tool_calls": [part]}, None) for piece in delta.calls for part in _call(piece)]
        choices: list[ChatChunkChoice] = [
            {"index": delta.choice, "delta": part, "logprobs": logprobs, "finish_reason": None}
            for part, logprobs in deltas
        ]
        if (reason := delta.finish_reason) is not None:
            end: ChatChunkChoice = {"index": delta.choice, "delta": {}, "logprobs": None, "finish_reason": reason}
            end["stop_reason"] = delta.stop_reason
            choices.append(end)
        return [_chat_chunk(self._chunk(), [choice]) for choice in choices]

    def _completion(self, delta: Delta) -> list[CompletionChunk]:
        if not (delta.text or delta.tokens or delta.finish_reason):
            return []
        choice: CompletionChunkChoice = {
            "index": delta.choice,
            "text": delta.text,
            "logprobs": shape_completion_logprobs(self._reply, delta.tokens),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return [_completion_chunk(self._chunk(), [choice])]

    def _chunk(self) -> Chunk:
        """Common fields of each chunk."""
        chunk = self._head.copy()
        if self._prepared.continuous_usage:
            chunk["usage"] = self._assembler.usage()
        elif self._prepared.include_usage:
            chunk["usage"] = None
        return chunk


def _chat_chunk(chunk: Chunk, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
    return {**chunk, "object": "chat.completion.chunk", "choices": choices}


def _completion_chunk(chunk: Chunk, choices: list[CompletionChunkChoice]) -> CompletionChunk:
    return {**chunk, "object": "text_completion", "choices": choices}


def _call(piece: CallPiece) -> list[ToolCallDelta]:
    """The function's name, then its arguments; clients join the pieces by index."""
    parts: list[ToolCallDelta] = []
    if piece.is_first:
        begun: FunctionDelta = {"name": piece.name, "arguments": ""}
        parts.append({"index": piece.index, "id": piece.id, "type": "function", "function": begun})
    if piece.arguments:
        parts.append({"index": piece.index, "function": {"arguments": piece.arguments}})
    return parts
