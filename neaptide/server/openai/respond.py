"""Builds replies from engine outputs, without asyncio; online routes and batch lines use the same assembler."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from neaptide.engine.messages import RequestOutput, TokenLogprobs
from neaptide.engine.params import FinishReason
from neaptide.server.edge.errors import ApiError, EngineFailedError, UnavailableError
from neaptide.server.openai.logprobs import ScoredToken, chat_logprobs, completion_logprobs
from neaptide.server.openai.prepare import CHAT, COMPLETIONS, RESPONSES, Prepared
from neaptide.server.openai.replies import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishName,
    RequestMetrics,
    Usage,
    WholeAnswer,
)
from neaptide.server.openai.responses.replies import ResponseObject
from neaptide.server.openai.responses.shape import build_response
from neaptide.server.openai.tool_calls import MAX_CALLS, ToolCall, ToolCallParser
from neaptide.server.text.detokenizer import IncrementalDecoder, StopScanner


@dataclass(slots=True)
class Delta:
    """Addition of one engine output to one choice."""

    choice: int
    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    """New tokens with their log-probabilities, if the request asked for them."""
    calls: list[ToolCall] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: FinishName | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True, frozen=True)
class ResponseMeta:
    """Fields of a body other than its choices."""

    id: str
    metrics: RequestMetrics | None = None


class ChoiceAssembler:
    """State of one choice: its text so far, its tokens, its end."""

    def __init__(self, prepared: Prepared, index: int) -> None:
        self.index = index
        self.finish_reason: FinishName | None = None
        self.stop_reason: str | int | None = None
        self.error: ApiError | None = None
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.tokens: list[ScoredToken] = []
        self.token_ids: list[int] = []
        self._prepared = prepared
        self._prompt = index // prepared.n
        tokenizer = prepared.context.tokenizer
        form = prepared.context.call_format
        marks = (tokenizer.added_id(mark) for mark in (form.begin, form.end))
        shown_ids = {mark for mark in marks if mark is not None} if prepared.tools else set()
        skip = prepared.skip_special_tokens
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip, shown_ids=shown_ids)
        self._scanner = StopScanner(prepared.stop, include_stop=prepared.include_stop)
        self._calls: ToolCallParser | None = None
        if prepared.tools:
            max_calls = MAX_CALLS if prepared.parallel_tool_calls else 1
            self._calls = ToolCallParser(prepared.tools, form, max_calls=max_calls)
        self._wants_logprobs = prepared.params.logprobs is not None
        self._parts: list[str] = []
        self._num_chars = 0
        self._started = False

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def ended_by(self) -> FinishName:
        """``finish_reason`` of an ended choice. Raises RuntimeError if it has not ended."""
        if self.finish_reason is None:
            raise RuntimeError(f"choice {self.index} has not ended")
        return self.finish_reason

    @property
    def stop_hit(self) -> bool:
        """Whether a stop string ended this choice, so that its engine request must be aborted."""
        return self._scanner.matched is not None

    @property
    def text(self) -> str:
        """All text shown so far."""
        return "".join(self._parts)

    @property
    def calls(self) -> list[ToolCall]:
        """Calls of offered tools so far."""
        return self._calls.calls if self._calls is not None else []

    def feed(self, output: RequestOutput) -> Delta:
        """Adds one engine output. After the end it adds nothing, so late outputs are harmless."""
        delta = Delta(self.index)
        self.num_preemptions = max(self.num_preemptions, output.num_preemptions)
        if self.finished:
            return delta
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if not self._started:
            self._start(output, delta)
        self._take_tokens(output, delta)
        if not self.finished and output.finish_reason is not None:
            self._end(output, delta)
        if self._calls is not None:
            self._take_calls(self._calls, delta)
        self._parts.append(delta.text)
        self.tokens += delta.tokens
        self.num_tokens += delta.num_tokens
        delta.finish_reason, delta.stop_reason = self.finish_reason, self.stop_reason
        return delta

    def _start(self, output: RequestOutput, delta: Delta) -> None:
        self._started = True
        if not self._prepared.echo:
            return
        text = self._prepared.prompt_texts[self._prompt]
        delta.text = text
        self._num_chars = len(text)
        if self._wants_logprobs:
            delta.tokens = self._prompt_tokens(output.prompt_logprobs or [], text)

    def _prompt_tokens(self, logprobs: list[TokenLogprobs], text: str) -> list[ScoredToken]:
        prompt = self._prepared.prompts[self._prompt]
        decoder = IncrementalDecoder(self._prepared.context.tokenizer, skip_special_tokens=False)
        offsets = [0]
        for token_id in prompt:
            offsets.append(offsets[-1] + len(decoder.push(token_id)))
        # Tokens that the tokenizer added before a text prompt have no characters in it.
        extra = max(0, offsets[-1] + len(decoder.flush()) - len(text))
        scores: list[TokenLogprobs | None] = [None, *logprobs]
        scores += [None] * (len(prompt) - len(scores))
        return [
            ScoredToken(token_id, max(0, offset - extra), score)
            for token_id, offset, score in zip(prompt, offsets, scores, strict=False)
        ]

    def _take_tokens(self, output: RequestOutput, delta: Delta) -> None:
        scores = output.logprobs or []
        for position, token_id in enumerate(output.new_token_ids):
            if self._wants_logprobs and position < len(scores):
                delta.tokens.append(ScoredToken(token_id, self._num_chars, scores[position]))
            delta.num_tokens += 1
            self.token_ids.append(token_id)
            piece = self._decoder.push(token_id)
            self._num_chars += len(piece)
            # The first min_tokens tokens cannot stop the output, as in the engine.
            can_stop = self.num_tokens + delta.num_tokens > self._prepared.params.min_tokens
            delta.text += self._scanner.push(piece) if can_stop else piece
            if self.stop_hit:
                self.finish_reason, self.stop_reason = "stop", self._scanner.matched
                return

    def _take_calls(self, parser: ToolCallParser, delta: Delta) -> None:
        known = len(parser.calls)
        delta.text = parser.push(delta.text)
        if self.finished:
            delta.text += parser.finish()
        delta.calls = parser.calls[known:]
        if parser.calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"

    def _end(self, output: RequestOutput, delta: Delta) -> None:
        if output.finish_reason is FinishReason.ERROR:
            self.error = EngineFailedError(output.error)
            return
        if output.finish_reason is FinishReason.ABORT:
            self.error = UnavailableError("The engine aborted this request; try again.", code="request_aborted")
            return
        delta.text += self._scanner.push(self._decoder.flush())
        if self.stop_hit:
            self.finish_reason, self.stop_reason = "stop", self._scanner.matched
            return
        delta.text += self._scanner.release()
        scores = output.logprobs or []
        if output.stop_token_id is not None and len(scores) > len(output.new_token_ids) and not self._prepared.is_chat:
            # A client that scores a prompt counts one token after it, whichever it is. A chat shows only its text.
            delta.tokens.append(ScoredToken(output.stop_token_id, self._num_chars, scores[-1]))
        self.finish_reason = "length" if output.finish_reason is FinishReason.LENGTH else "stop"
        if output.stop_token_id in self._prepared.params.stop_token_ids:
            self.stop_reason = output.stop_token_id


class ResponseAssembler:
    """All choices of one request. Feed outputs in any order; read ``body`` when ``finished``."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.choices = [ChoiceAssembler(prepared, index) for index in range(prepared.num_choices)]
        self._unfinished = len(self.choices)

    def feed(self, choice_index: int, output: RequestOutput) -> Delta:
        """Adds one engine output of one choice."""
        choice = self.choices[choice_index]
        was_finished = choice.finished
        delta = choice.feed(output)
        self._unfinished -= choice.finished and not was_finished
        return delta

    @property
    def finished(self) -> bool:
        """Whether every choice has ended, successfully or not; see ``error``."""
        return self._unfinished == 0

    @property
    def stop_hit(self) -> list[bool]:
        """Whether a stop string ended each choice, so that its engine request must be aborted with STOP."""
        return [choice.stop_hit for choice in self.choices]

    @property
    def error(self) -> ApiError | None:
        """The first failed choice's error; there is then no body."""
        return next((choice.error for choice in self.choices if choice.error is not None), None)

    def usage(self) -> Usage:
        """Token counts so far."""
        return usage(self.prepared, self.choices)

    def body(
        self, request_id: str, metrics: RequestMetrics | None = None
    ) -> ChatCompletion | Completion | ResponseObject:
        """The complete reply. Raises the ApiError of a failed choice."""
        if self.error is not None:
            raise self.error
        return build_body(self.prepared, self.choices, self._meta(request_id, metrics))

    def encoded(self, request_id: str, metrics: RequestMetrics | None = None) -> bytes:
        """``body`` as JSON, encoded choice by choice, because the encoder blocks other threads."""
        if self.error is not None:
            raise self.error
        meta = self._meta(request_id, metrics)
        return msgspec.json.encode(build_body(self.prepared, self.choices, meta, _encoded_part))

    def _meta(self, request_id: str, metrics: RequestMetrics | None) -> ResponseMeta:
        return ResponseMeta(response_id(self.prepared, request_id), metrics)


def _encoded_part(shaped: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(shaped))


def response_id(prepared: Prepared, request_id: str) -> str:
    """The body's id: the endpoint's prefix and the given id."""
    prefix = {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-", RESPONSES: "resp_"}[prepared.endpoint]
    return request_id if request_id.startswith(prefix) else prefix + request_id


def build_body(
    prepared: Prepared,
    choices: Sequence[ChoiceAssembler],
    meta: ResponseMeta,
    part: Callable[[Any], Any] = lambda shaped: shaped,
) -> ChatCompletion | Completion | ResponseObject:
    """The whole reply in the endpoint's format; ``part`` converts each choice."""
    if prepared.endpoint == RESPONSES:
        return build_response(prepared, choices[0], usage(prepared, choices), meta.id)
    whole: WholeAnswer = {
        "id": meta.id,
        "created": prepared.created,
        "model": prepared.model,
        "usage": usage(prepared, choices),
        "service_tier": prepared.service_tier,
        "system_fingerprint": prepared.context.system_fingerprint,
    }
    if meta.metrics is not None:
        whole["metrics"] = meta.metrics
    if prepared.is_chat:
        return ChatCompletion(
            **whole, object="chat.completion", choices=[part(_chat_choice(prepared, choice)) for choice in choices]
        )
    return Completion(
        **whole, object="text_completion", choices=[part(_completion_choice(prepared, choice)) for choice in choices]
    )


def _chat_choice(prepared: Prepared, choice: ChoiceAssembler) -> ChatChoice:
    message: AssistantMessage = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [call.as_message_part() for call in choice.calls]
    shaped: ChatChoice = {
        "index": choice.index,
        "message": message,
        "logprobs": shape_chat_logprobs(prepared, choice.tokens),
        "finish_reason": choice.ended_by,
        "stop_reason": choice.stop_reason,
    }
    if prepared.return_token_ids:
        shaped["token_ids"] = choice.token_ids
    return shaped


def _completion_choice(prepared: Prepared, choice: ChoiceAssembler) -> CompletionChoice:
    shaped: CompletionChoice = {
        "index": choice.index,
        "text": choice.text,
        "logprobs": shape_completion_logprobs(prepared, choice.tokens),
        "finish_reason": choice.ended_by,
        "stop_reason": choice.stop_reason,
    }
    if prepared.return_token_ids:
        shaped["token_ids"] = choice.token_ids
    return shaped


def shape_chat_logprobs(prepared: Prepared, tokens: Sequence[ScoredToken]) -> ChatLogprobs | None:
    """Log-probabilities of a chat; None if the request did not ask for them."""
    return None if prepared.params.logprobs is None else chat_logprobs(tokens, prepared.context.tokenizer)


def shape_completion_logprobs(prepared: Prepared, tokens: Sequence[ScoredToken]) -> CompletionLogprobs | None:
    """Log-probabilities of a completion; None if the request did not ask for them."""
    return None if prepared.params.logprobs is None else completion_logprobs(tokens, prepared.context.tokenizer)


def usage(prepared: Prepared, choices: Sequence[ChoiceAssembler]) -> Usage:
    """Token counts. A prompt counts once, however many choices it has; recomputed tokens are not counted again."""
    prompt_tokens = sum(map(len, prepared.prompts))
    completion_tokens = sum(choice.num_tokens for choice in choices)
    # Choices of one request share its prompt in the cache; only blocks cached before the first count as cached.
    groups = [choices[p * prepared.n : (p + 1) * prepared.n] for p in range(len(prepared.prompts))]
    cached_tokens = sum(min(choice.num_cached_tokens for choice in group) for group in groups)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
