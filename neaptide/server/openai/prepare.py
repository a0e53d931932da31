"""Converts a request body to engine requests, for online requests and batch lines alike.

It is pure computation on the caller's thread: no clock but the wall clock's timestamp, no engine, no waiting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError

from neaptide.engine.params import SamplingParams, Tier
from neaptide.server.context import ServingContext
from neaptide.server.http.errors import (
    ApiError,
    ContextLengthError,
    InvalidRequestError,
    NotFoundError,
    UnsupportedParameterError,
    from_validation_error,
    model_not_found,
)
from neaptide.server.openai.endpoints import CHAT, COMPLETIONS, RESPONSES
from neaptide.server.openai.replies import TierName
from neaptide.server.openai.reply_form import EchoedPrompt, Reply, ReplyForm
from neaptide.server.openai.responses.bodies import ResponsesBody
from neaptide.server.openai.responses.shape import asked_of
from neaptide.server.openai.responses.translate import SEALED, as_chat, check_fields_of_chats, own_name
from neaptide.server.openai.sampling import sampling_params
from neaptide.server.openai.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Tool,
    unsupported_fields,
)
from neaptide.server.parsers.calls import parameter_types
from neaptide.server.parsers.core import ReasoningFormat
from neaptide.server.structured.constraints import Constraint, Thinking, constraint_of
from neaptide.server.text.prompts import MAX_CHOICES, completion_prompts, encode_conversation, offered_tools

_OUTPUT_CONTEXTS = 8
"""Most output tokens of a request (n times max_tokens), in contexts."""

_PROMPT_END_TOKENS = 32
"""End of a prompt in which a mark that opens or closes reasoning is looked for."""

_UNSUPPORTED: Mapping[type[Body], list[str]] = {
    model: unsupported_fields(model) for model in (ChatBody, CompletionBody)
}

_SHOWN_TIERS: dict[Tier, TierName] = {
    Tier.PRIORITY: "priority",
    Tier.DEFAULT: "default",
    Tier.FLEX: "flex",
    Tier.BATCH: "flex",
}
_B = TypeVar("_B", bound=Body)


@dataclass(slots=True, frozen=True, kw_only=True)
class Prepared:
    """A valid request: the engine requests of its choices, and the format of its reply."""

    form: ReplyForm
    tier: Tier
    created: int
    """Unix seconds."""
    context: ServingContext
    prompts: list[list[int]]
    max_tokens: list[int]
    """Token limit of each prompt: the requested one, or the rest of the context."""
    params: SamplingParams
    stream: bool
    include_usage: bool
    continuous_usage: bool
    ttft_slo_s: float
    tpot_slo_s: float
    cache_salt: str | None
    """The caller's own salt, which divides the prefix cache of its key."""
    constraint: Constraint | None
    """Constraint on the output, which has not been compiled yet."""
    is_limited: bool = False
    """Whether the caller says how long an answer may be."""
    is_cut: bool = False
    """Whether the caller asked for longer answers than the context allows."""

    @property
    def reply(self) -> Reply:
        """What the reply is made from."""
        return Reply(self.form, self.context, self.created)

    @property
    def requests(self) -> list[list[int]]:
        """Prompt token ids per choice."""
        return [prompt for prompt in self.prompts for _ in range(self.form.n)]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; choices of one prompt share it."""
        return sum(map(len, self.prompts))

    @property
    def reserved_tokens(self) -> int:
        """Most tokens of all answers that the caller asks for; 0 if it sets no limit."""
        return sum(self.max_tokens) * self.form.n if self.is_limited else 0

    @property
    def n(self) -> int:
        """Choices of each prompt."""
        return self.form.n

    @property
    def num_choices(self) -> int:
        """Number of engine requests."""
        return self.form.num_choices

    def params_for(self, choice: int) -> SamplingParams:
        """Sampling of one choice: its prompt's token limit, and its own seed if the request has one."""
        prompt, k = divmod(choice, self.form.n)
        seed = None if self.params.seed is None else (self.params.seed + k) & ((1 << 63) - 1)
        return msgspec.structs.replace(self.params, max_tokens=self.max_tokens[prompt], seed=seed)


def prepare(endpoint: str, body: object, context: ServingContext, default_tier: Tier = Tier.DEFAULT) -> Prepared:
    """Checks a body and converts it to token ids and sampling parameters.

    ``default_tier`` is what ``service_tier`` auto means for this caller. With ``Tier.BATCH`` the body's own
    ``service_tier`` is ignored.

    Raises:
        ApiError: the caller's error, with its status.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("The request body must be a JSON object.", code="invalid_type")
    if endpoint == CHAT:
        chat = parse_body(ChatBody, body)
        check_model(chat.model, context)
        _check_common(chat, default_tier)
        prompt = encode_conversation(chat, body.get("tools"), context)
        logprobs = _chat_logprobs(chat)
        limit = chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
        tools = offered_tools(chat)
        thinking = _thinking(chat, prompt, context)
        constraint = constraint_of(chat, tools, context, thinking)
        asked_chat = _Asked(
            [prompt],
            [""],
            limit,
            logprobs,
            tools=tools,
            parallel_tool_calls=chat.parallel_tool_calls,
            constraint=constraint,
            is_reasoning=thinking is Thinking.BEGUN,
            shows_reasoning=chat.include_reasoning,
        )
        return _finish(endpoint, chat, context, default_tier, asked_chat)
    if endpoint == COMPLETIONS:
        completion = parse_body(CompletionBody, body)
        check_model(completion.model, context)
        _check_common(completion, default_tier)
        _check_completion(completion)
        prompts, texts = completion_prompts(completion, context)
        constraint = constraint_of(completion, (), context)
        limit, logprobs = completion.max_tokens, completion.logprobs
        asked = _Asked(prompts, texts, limit, logprobs, completion.echo, constraint=constraint)
        return _finish(endpoint, completion, context, default_tier, asked)
    if endpoint == RESPONSES:
        response = parse_body(ResponsesBody, body)
        check_fields_of_chats(body)
        return _prepare_response(response, context, default_tier)
    raise NotFoundError("Unknown request URL.", code="unknown_url")


def _prepare_response(body: ResponsesBody, context: ServingContext, default_tier: Tier) -> Prepared:
    chat = as_chat(body)
    try:
        prepared = prepare(CHAT, chat, context, default_tier)
    except ApiError as error:
        error.param = None if error.param is None else own_name(error.param)
        raise
    constraint = prepared.constraint
    if constraint is not None:
        constraint = replace(constraint, param=own_name(constraint.param))
    asked = asked_of(body, prepared.params.temperature, prepared.params.top_p)
    seals_reasoning = SEALED in body.include
    form = msgspec.structs.replace(prepared.form, endpoint=RESPONSES, asked=asked, seals_reasoning=seals_reasoning)
    return replace(prepared, form=form, constraint=constraint)


def parse_body(model: type[_B], body: dict[str, Any]) -> _B:
    """The body parsed by its schema. Raises InvalidRequestError."""
    try:
        return model.model_validate(body)
    except ValidationError as exc:
        raise from_validation_error(exc, body) from None


def check_model(model: str, context: ServingContext) -> None:
    """Checks the model's name; an absent or empty one means the served model."""
    if not context.serves(model):
        raise model_not_found(context.model_id)


@dataclass(slots=True, frozen=True)
class _Asked:
    """Values for which chats and completions have different fields."""

    prompts: list[list[int]]
    texts: list[str]
    max_tokens: int | None
    logprobs: int | None
    echo: bool = False
    tools: Sequence[Tool] = ()
    parallel_tool_calls: bool = True
    constraint: Constraint | None = None
    is_reasoning: bool = False
    shows_reasoning: bool = True


def _thinking(chat: ChatBody, prompt: list[int], context: ServingContext) -> Thinking:
    """How the output begins, by the model's reasoning format and the end of the prompt."""
    form = context.parsers.reasoning
    if form is None:
        return Thinking.NEVER
    end = context.tokenizer.decode(prompt[-_PROMPT_END_TOKENS:])
    if form.is_open_after(end) or (chat.continue_final_message and _goes_on_thinking(chat, prompt, form, context)):
        return Thinking.BEGUN
    return Thinking.NEVER if form.is_closed_after(end) or chat.continue_final_message else Thinking.MAY_BEGIN


def _goes_on_thinking(chat: ChatBody, prompt: list[int], form: ReasoningFormat, context: ServingContext) -> bool:
    """Whether a prompt that ends with the final message ends inside that message's reasoning."""
    final = chat.messages[-1].model_dump_json()
    if chat.messages[-1].role != "assistant":
        return False
    text = context.tokenizer.decode(prompt[-len(final) - _PROMPT_END_TOKENS :])[-len(final) - 8 * _PROMPT_END_TOKENS :]
    return max(text.rfind(begin) for begin in form.begins) > max(text.rfind(end) for end in form.ends)


def _longest_output(constraint: Constraint | None) -> int | None:
    """Longest output in tokens that the grammar allows, None if unbounded. A token has at least a byte, and one more
    ends it."""
    if constraint is None or constraint.max_bytes is None:
        return None
    return constraint.max_bytes + 1


def _finish(
    endpoint: str, body: GenerationBody, context: ServingContext, default_tier: Tier, asked: _Asked
) -> Prepared:
    for index, prompt in enumerate(asked.prompts):
        _check_prompt(prompt, index, asked, endpoint, context)
    if len(asked.prompts) * body.n > MAX_CHOICES:
        raise InvalidRequestError(f"At most {MAX_CHOICES} choices in one request.", param="n", code="invalid_value")
    wanted, longest = asked.max_tokens, _longest_output(asked.constraint)
    if wanted is not None and longest is not None:
        wanted = min(wanted, longest)  # Clamped before it could be refused as too large.
    max_tokens = [_token_limit(len(prompt), wanted, body.n, context) for prompt in asked.prompts]
    if longest is not None:
        max_tokens = [min(limit, longest) for limit in max_tokens]
    if body.min_tokens > min(max_tokens):
        raise InvalidRequestError("min_tokens is above max_tokens.", param="min_tokens", code="invalid_value")
    tier, service_tier = _tier(body.service_tier, default_tier)
    options = body.stream_options
    return Prepared(
        form=_reply_form(endpoint, body, context, service_tier, asked),
        tier=tier,
        created=int(context.wall_clock()),
        context=context,
        prompts=asked.prompts,
        max_tokens=max_tokens,
        params=sampling_params(
            body,
            context,
            logprobs=asked.logprobs,
            echo=asked.echo,
            grammar="" if asked.constraint is None else asked.constraint.grammar,
        ),
        stream=body.stream,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.include_usage and options.continuous_usage_stats,
        ttft_slo_s=context.ttft_slo_s if body.ttft_slo_ms is None else body.ttft_slo_ms / 1000,
        tpot_slo_s=context.tpot_slo_s if body.tpot_slo_ms is None else body.tpot_slo_ms / 1000,
        cache_salt=body.cache_salt,
        constraint=asked.constraint,
        is_limited=asked.max_tokens is not None,
        is_cut=wanted is not None and min(max_tokens) < wanted,
    )


def _reply_form(
    endpoint: str, body: GenerationBody, context: ServingContext, service_tier: TierName, asked: _Asked
) -> ReplyForm:
    return ReplyForm(
        endpoint=endpoint,
        model=body.model or context.model_id,
        service_tier=service_tier,
        n=body.n,
        num_prompts=len(asked.prompts),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        include_stop=body.include_stop_str_in_output,
        stop_token_ids=tuple(body.stop_token_ids),
        min_tokens=body.min_tokens,
        skip_special_tokens=body.skip_special_tokens,
        return_token_ids=body.return_token_ids,
        wants_logprobs=asked.logprobs is not None,
        echoed=_echoed(asked) if asked.echo else [],
        tools=tuple(dict.fromkeys(tool.function.name for tool in asked.tools)),
        parallel_tool_calls=asked.parallel_tool_calls,
        is_forced=asked.constraint is not None and asked.constraint.forces_calls,
        parameter_types=_parameter_types(asked.tools, context),
        is_reasoning=asked.is_reasoning,
        shows_reasoning=asked.shows_reasoning,
    )


def _parameter_types(tools: Sequence[Tool], context: ServingContext) -> dict[str, dict[str, str]]:
    form = context.parsers.tools
    if form is None or not form.needs_types:
        return {}
    found = {tool.function.name: parameter_types(tool.function.parameters) for tool in tools}
    return {name: types for name, types in found.items() if types}


def _echoed(asked: _Asked) -> list[EchoedPrompt]:
    is_scored = asked.logprobs is not None
    pairs = zip(asked.texts, asked.prompts, strict=True)
    return [EchoedPrompt(text, prompt if is_scored else []) for text, prompt in pairs]


# ---- checks ----------------------------------------------------------------------------------------------


def _check_common(body: GenerationBody, default_tier: Tier) -> None:
    for name in _UNSUPPORTED[type(body)]:
        value = getattr(body, name)
        # Clients send defaults that ask for nothing; 0 asks for something.
        if value is not None and value is not False and value not in ("", []):
            raise UnsupportedParameterError(f"'{name}' is not supported.", param=name)
    if body.return_token_ids and body.stream:
        raise UnsupportedParameterError("Not supported with stream.", param="return_token_ids")
    if body.stream and default_tier is Tier.BATCH:
        raise InvalidRequestError("A batch line cannot stream.", param="stream", code="streaming_unsupported")
    if body.cache_salt is not None and default_tier is Tier.BATCH:
        raise UnsupportedParameterError("The lines of a batch share one cache salt.", param="cache_salt")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("Only allowed when stream is true.", param="stream_options", code="invalid_value")


def _check_completion(body: CompletionBody) -> None:
    if body.suffix:
        raise UnsupportedParameterError("Infilling is not supported.", param="suffix")
    if body.best_of not in (None, 1, body.n):
        raise UnsupportedParameterError("best_of other than n is not supported.", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequestError("0 is only allowed with echo.", param="max_tokens", code="invalid_value")


def _check_prompt(prompt: list[int], index: int, asked: _Asked, endpoint: str, context: ServingContext) -> None:
    place = "messages" if endpoint == CHAT else "prompt"
    if not prompt:
        raise InvalidRequestError("The prompt is empty.", param=place, code="invalid_value")
    if max(prompt) >= context.vocab_size:
        param = f"{place}.{index}" if len(asked.prompts) > 1 else place
        raise InvalidRequestError("A token id is outside the vocabulary.", param=param, code="invalid_value")
    room = context.max_model_len - (0 if asked.max_tokens == 0 else 1)
    if len(prompt) > room:
        raise ContextLengthError(
            f"The prompt has {len(prompt)} tokens; the model's context holds {context.max_model_len}.", param=place
        )


def _token_limit(prompt_tokens: int, asked: int | None, n: int, context: ServingContext) -> int:
    remaining = context.max_model_len - prompt_tokens
    allowance = _OUTPUT_CONTEXTS * context.max_model_len
    if asked is None:
        return max(1, min(remaining, allowance // n, context.generation_defaults.max_tokens or remaining))
    limit = min(asked, remaining)
    if n * limit > allowance:
        raise InvalidRequestError(f"n times max_tokens is above {allowance}.", param="n", code="invalid_value")
    return limit


def asked_tier(body: Mapping[str, Any], default_tier: Tier) -> Tier:
    """The tier that an unchecked body asks for; an unknown one counts as the default."""
    try:
        return _tier(str(body.get("service_tier")), default_tier)[0]
    except KeyError:
        return default_tier


def _tier(value: str, default_tier: Tier) -> tuple[Tier, TierName]:
    if default_tier is Tier.BATCH:
        return Tier.BATCH, _SHOWN_TIERS[Tier.BATCH]
    tier = {
        "auto": default_tier,
        "default": Tier.DEFAULT,
        "scale": Tier.DEFAULT,
        "priority": Tier.PRIORITY,
        "fast": Tier.PRIORITY,
        "flex": Tier.FLEX,
    }[value]
    return tier, _SHOWN_TIERS[tier]


def _chat_logprobs(body: ChatBody) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise InvalidRequestError("Only allowed when logprobs is true.", param="top_logprobs", code="invalid_value")
        return None
    return body.top_logprobs or 0
