"""Builds replies from engine outputs, without asyncio; online routes and batch lines use the same assembler."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from neaptide.engine.messages import RequestOutput, TokenLogprobs
from neaptide.engine.params import FinishReason
from neaptide.server.http.errors import ApiError, EngineFailedError, UnavailableError
from neaptide.server.openai.endpoints import CHAT, COMPLETIONS, RESPONSES
from neaptide.server.openai.logprobs import ScoredToken, chat_logprobs, completion_logprobs
from neaptide.server.openai.prepare import Prepared
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
from neaptide.server.openai.reply_form import EchoedPrompt, Reply, ReplyForm
from neaptide.server.openai.responses.replies import ResponseObject
from neaptide.server.openai.responses.shape import build_response
from neaptide.server.parsers.calls import CallPiece, Offer, ParsedToolCall
from neaptide.server.parsers.core import MAX_CALLS, OutputParser, Pieces
from neaptide.server.parsers.formats import PLAIN
from neaptide.server.text.detokenizer import IncrementalDecoder, StopScanner


@dataclass(slots=True)
class Delta:
    """Addition of one engine output to one choice."""

    choice: int
    text: str = ""
    reasoning: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    """New tokens with their log-probabilities, if the request asked for them."""
    calls: list[CallPiece] = field(default_factory=list)
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

    def __init__(self, reply: Reply, index: int) -> None:
        self.index = index
        self.finish_reason: FinishName | None = None
        self.stop_reason: str | int | None = None
        self.error: ApiError | None = None
        self.num_tokens = 0
        self.num_prompt_tokens = 0
        """As the engine says."""
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.tokens: list[ScoredToken] = []
        self.token_ids: list[int] = []
        self._form = form = reply.form
        self._tokenizer = tokenizer = reply.context.tokenizer
        self._parser = _parser_of(reply)
        shown_ids = set() if self._parser is None else tokenizer.special_ids_in(self._parser.marks)
        skip = form.skip_special_tokens
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip, shown_ids=shown_ids)
        self._scanner = StopScanner(form.stop, include_stop=form.include_stop)
        self._held_tokens: list[ScoredToken] = []
        """Scored tokens whose text may still become part of a stop string."""
        self._num_shown_chars = 0
        self._parts: list[str] = []
        self._thoughts: list[str] = []
        self.num_reasoning_tokens = 0
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
    def reasoning(self) -> str:
        """All reasoning so far."""
        return "".join(self._thoughts)

    @property
    def calls(self) -> list[ParsedToolCall]:
        """Calls of offered tools so far."""
        return self._parser.calls if self._parser is not None else []

    def feed(self, output: RequestOutput) -> Delta:
        """Adds one engine output. After the end it adds nothing, so late outputs are harmless."""
        delta = Delta(self.index)
        self.num_preemptions = max(self.num_preemptions, output.num_preemptions)
        if self.finished:
            return delta
        self.num_prompt_tokens = max(self.num_prompt_tokens, output.num_prompt_tokens)
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if not self._started:
            self._start(output, delta)
        self._take_tokens(output, delta)
        if not self.finished and output.finish_reason is not None:
            self._end(output, delta)
        if self._parser is not None:
            self._parse_end(self._parser, delta)
        self._parts.append(delta.text)
        self._thoughts.append(delta.reasoning)
        self.tokens += delta.tokens
        self.num_tokens += delta.num_tokens
        delta.finish_reason, delta.stop_reason = self.finish_reason, self.stop_reason
        return delta

    def _start(self, output: RequestOutput, delta: Delta) -> None:
        self._started = True
        if not self._form.echoed:
            return
        prompt = self._form.echoed[self.index // self._form.n]
        delta.text = prompt.text
        self._num_chars = self._num_shown_chars = len(prompt.text)
        if self._form.wants_logprobs:
            delta.tokens = self._prompt_tokens(prompt, output.prompt_logprobs or [])

    def _prompt_tokens(self, prompt: EchoedPrompt, logprobs: list[TokenLogprobs]) -> list[ScoredToken]:
        decoder = IncrementalDecoder(self._tokenizer, skip_special_tokens=False)
        offsets = [0]
        for token_id in prompt.token_ids:
            offsets.append(offsets[-1] + len(decoder.push(token_id)))
        # Tokens that the tokenizer added before a text prompt have no characters in it.
        extra = max(0, offsets[-1] + len(decoder.flush()) - len(prompt.text))
        scores: list[TokenLogprobs | None] = [None, *logprobs]
        scores += [None] * (len(prompt.token_ids) - len(scores))
        return [
            ScoredToken(token_id, max(0, offset - extra), score)
            for token_id, offset, score in zip(prompt.token_ids, offsets, scores, strict=False)
        ]

    def _take_tokens(self, output: RequestOutput, delta: Delta) -> None:
        scores = output.logprobs or []
        for position, token_id in enumerate(output.new_token_ids):
            if self._form.wants_logprobs and position < len(scores):
                self._held_tokens.append(ScoredToken(token_id, self._num_chars, scores[position]))
            delta.num_tokens += 1
            self.token_ids.append(token_id)
            piece = self._decoder.push(token_id)
            self._num_chars += len(piece)
            # The first min_tokens tokens cannot stop the output, as in the engine.
            can_stop = self.num_tokens + delta.num_tokens > self._form.min_tokens
            shown = self._scanner.push(piece) if can_stop else piece
            self._show_tokens(delta, len(shown))
            self._show(delta, shown)
            if self.stop_hit:
                self.finish_reason, self.stop_reason = "stop", self._scanner.matched
                return

    def _show_tokens(self, delta: Delta, num_chars: int) -> None:
        """Releases scored tokens with the text that is shown: those of a stop string are dropped with it."""
        self._num_shown_chars += num_chars
        held = self._held_tokens
        count = len(held)
        if self._form.stop:
            count = next((at for at, token in enumerate(held) if token.offset >= self._num_shown_chars), count)
        delta.tokens += held[:count]
        del held[:count]

    def _show(self, delta: Delta, text: str) -> None:
        """Adds text of the output: as it is, or as what the parser finds in it."""
        parser = self._parser
        if parser is None:
            delta.text += text
            return
        was_reasoning = parser.is_reasoning
        self._take(delta, parser.push(text))
        self.num_reasoning_tokens += was_reasoning or parser.is_reasoning

    def _show_rest(self, delta: Delta, text: str) -> None:
        """Adds text that was held back; its tokens have been counted."""
        if self._parser is None:
            delta.text += text
        else:
            self._take(delta, self._parser.push(text))

    def _parse_end(self, parser: OutputParser, delta: Delta) -> None:
        if self.finished:
            self._take(delta, parser.finish(is_cut=self.finish_reason == "length"))
        if parser.calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"

    def _take(self, delta: Delta, pieces: Pieces) -> None:
        delta.text += pieces.content
        delta.reasoning += pieces.reasoning if self._form.shows_reasoning else ""
        delta.calls += pieces.calls

    def _end(self, output: RequestOutput, delta: Delta) -> None:
        if output.finish_reason is FinishReason.ERROR:
            self.error = EngineFailedError(output.error)
            return
        if output.finish_reason is FinishReason.ABORT:
            self.error = UnavailableError("The engine aborted this request; try again.", code="request_aborted")
            return
        self._show_rest(delta, self._scanner.push(self._decoder.flush()))
        if self.stop_hit:
            self.finish_reason, self.stop_reason = "stop", self._scanner.matched
            return
        self._show_rest(delta, self._scanner.release())
        delta.tokens += self._held_tokens
        scores = output.logprobs or []
        if output.stop_token_id is not None and len(scores) > len(output.new_token_ids) and not self._form.is_chat:
            # A client that scores a prompt counts one token after it, whichever it is. A chat shows only its text.
            delta.tokens.append(ScoredToken(output.stop_token_id, self._num_chars, scores[-1]))
        self.finish_reason = "length" if output.finish_reason is FinishReason.LENGTH else "stop"
        if output.stop_token_id in self._form.stop_token_ids:
            self.stop_reason = output.stop_token_id


def _parser_of(reply: Reply) -> OutputParser | None:
    """Parser of one choice's output; None if the output is text alone."""
    form, found = reply.form, reply.context.parsers
    if not form.is_chat or (found.reasoning is None and not form.tools):
        return None
    tools = found.tools
    if form.is_forced and (tools is None or tools.grammar is None):
        tools = PLAIN
    return OutputParser(
        found.reasoning,
        tools if form.tools else None,
        Offer(frozenset(form.tools), form.parameter_types),
        is_reasoning=form.is_reasoning,
        max_calls=MAX_CALLS if form.parallel_tool_calls else 1,
    )


class ResponseAssembler:
    """All choices of one request. Feed outputs in any order; read ``body`` when ``finished``.

    Args:
        num_prompt_tokens: number of tokens of all prompts; None takes it from the engine's outputs.
    """

    def __init__(self, reply: Reply, num_prompt_tokens: int | None = None) -> None:
        self.reply = reply
        self.choices = [ChoiceAssembler(reply, index) for index in range(reply.form.num_choices)]
        self._unfinished = len(self.choices)
        self._num_prompt_tokens = num_prompt_tokens

    @classmethod
    def of(cls, prepared: Prepared) -> "ResponseAssembler":
        """Assembler for a request that this process has prepared."""
        return cls(prepared.reply, sum(map(len, prepared.prompts)))

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
        """Token counts so far. A prompt counts once however many choices it has; preempted work is not billed again."""
        n = self.reply.form.n
        groups = [self.choices[first : first + n] for first in range(0, len(self.choices), n)]
        prompt_tokens = self._num_prompt_tokens
        if prompt_tokens is None:
            prompt_tokens = sum(max(choice.num_prompt_tokens for choice in group) for group in groups)
        # Siblings of one request find each other's prompt; only what was there before the first is a saving.
        cached_tokens = sum(min(choice.num_cached_tokens for choice in group) for group in groups)
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.num_reasoning_tokens for choice in self.choices),
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }

    def body(
        self, request_id: str, metrics: RequestMetrics | None = None
    ) -> ChatCompletion | Completion | ResponseObject:
        """The complete reply. Raises the ApiError of a failed choice."""
        if self.error is not None:
            raise self.error
        return self._build(self._meta(request_id, metrics))

    def encoded(self, request_id: str, metrics: RequestMetrics | None = None) -> bytes:
        """``body`` as JSON, encoded choice by choice, because the encoder blocks other threads."""
        if self.error is not None:
            raise self.error
        meta = self._meta(request_id, metrics)
        return msgspec.json.encode(self._build(meta, _encoded_part))

    def _meta(self, request_id: str, metrics: RequestMetrics | None) -> ResponseMeta:
        return ResponseMeta(response_id(self.reply.form, request_id), metrics)

    def _build(
        self, meta: ResponseMeta, part: Callable[[Any], Any] = lambda shaped: shaped
    ) -> ChatCompletion | Completion | ResponseObject:
        """The whole answer, in the endpoint's shape; ``part`` is what stands there for each choice."""
        reply, form = self.reply, self.reply.form
        if form.endpoint == RESPONSES:
            return build_response(reply, self.choices[0], self.usage(), meta.id)
        whole: WholeAnswer = {
            "id": meta.id,
            "created": reply.created,
            "model": form.model,
            "usage": self.usage(),
            "service_tier": form.service_tier,
            "system_fingerprint": reply.context.system_fingerprint,
        }
        if meta.metrics is not None:
            whole["metrics"] = meta.metrics
        if form.is_chat:
            chat_choices = [part(_chat_choice(reply, choice)) for choice in self.choices]
            return ChatCompletion(**whole, object="chat.completion", choices=chat_choices)
        choices = [part(_completion_choice(reply, choice)) for choice in self.choices]
        return Completion(**whole, object="text_completion", choices=choices)


def _encoded_part(shaped: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(shaped))


def response_id(form: ReplyForm, request_id: str) -> str:
    """The body's id: the endpoint's prefix and the given id."""
    prefix = {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-", RESPONSES: "resp_"}[form.endpoint]
    return request_id if request_id.startswith(prefix) else prefix + request_id


def _chat_choice(reply: Reply, choice: ChoiceAssembler) -> ChatChoice:
    message: AssistantMessage = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [call.as_message_part() for call in choice.calls]
    shaped: ChatChoice = {
        "index": choice.index,
        "message": message,
        "logprobs": shape_chat_logprobs(reply, choice.tokens),
        "finish_reason": choice.ended_by,
        "stop_reason": choice.stop_reason,
    }
    if reply.form.return_token_ids:
        shaped["token_ids"] = choice.token_ids
    return shaped


def _completion_choice(reply: Reply, choice: ChoiceAssembler) -> CompletionChoice:
    shaped: CompletionChoice = {
        "index": choice.index,
        "text": choice.text,
        "logprobs": shape_completion_logprobs(reply, choice.tokens),
        "finish_reason": choice.ended_by,
        "stop_reason": choice.stop_reason,
    }
    if reply.form.return_token_ids:
        shaped["token_ids"] = choice.token_ids
    return shaped


def shape_chat_logprobs(reply: Reply, tokens: Sequence[ScoredToken]) -> ChatLogprobs | None:
    """Log-probabilities of a chat; None if the request did not ask for them."""
    return chat_logprobs(tokens, reply.context.tokenizer) if reply.form.wants_logprobs else None


def shape_completion_logprobs(reply: Reply, tokens: Sequence[ScoredToken]) -> CompletionLogprobs | None:
    """Log-probabilities of a completion; None if the request did not ask for them."""
    return completion_logprobs(tokens, reply.context.tokenizer) if reply.form.wants_logprobs else None
