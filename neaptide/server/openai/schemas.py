"""Request bodies of the OpenAI API.

Unknown fields are ignored, as clients send many. An explicit null means "omitted", for every field. Fields that would
change the output but are not offered are declared ``Unsupported`` and refused in ``prepare``: ignoring them silently
would give wrong answers that look right.

A body is refused at the first wrong entry of a list. The size of an object is checked before its entries. Otherwise a
body of 2 MB could become a million errors, made in one call that blocks all other threads.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticKnownError

MAX_TOP_LOGPROBS = 20
MAX_CHOICES_PER_PROMPT = 128
LEAST_REPETITION_PENALTY = 0.01
"""Least value; logits are divided by it, and with 1e-38 they overflow in fp32."""
MAX_LISTED_CHOICES = 4096
_INT64 = Field(ge=-(1 << 63), le=(1 << 63) - 1)
_INT31 = (1 << 31) - 1


def at_most(num_entries: int) -> BeforeValidator:
    """Checks the size of an object before its entries; ``max_length`` is checked after them."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > num_entries:
            bound = {"field_type": "Dictionary", "max_length": num_entries, "actual_length": len(value)}
            raise PydanticKnownError("too_long", bound)
        return value

    return BeforeValidator(check)


Int64 = Annotated[int, _INT64]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, le=_INT31)]
TargetMs = Annotated[float, Field(ge=1e-3, le=86_400_000)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=1 << 20)]
ListedChoices = Annotated[list[str], Field(fail_fast=True, max_length=MAX_LISTED_CHOICES)]
TemplateVariables = Annotated[dict[str, Any], Field(max_length=32), at_most(32)]
Bias = Annotated[float, Field(ge=-100, le=100)]
_NOT_OFFERED = WithJsonSchema({"type": "null", "description": "Not offered; refused."})
Unsupported = Annotated[Any, _NOT_OFFERED]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _null_means_omitted(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data


def unsupported_fields(model: type[Body]) -> list[str]:
    """Fields of the model that are declared ``Unsupported``."""
    return [name for name, field in model.model_fields.items() if _NOT_OFFERED in field.metadata]


class StreamOptions(Body):
    """Options of a stream: ``stream_options``."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


JsonObject = dict[str, Any]


class JsonSchemaFormat(Body):
    """Schema of the output: ``response_format.json_schema``. It is enforced whether ``strict`` is set or not."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Format of the output: ``response_format``, which is text, json_object or json_schema. Other fields than these are
    refused: they would change the output."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(max_length=64)
    json_schema: JsonSchemaFormat | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    """Schema of a json_object."""


class StructuredOutputs(Body):
    """Constraint on the output, as in vLLM: ``structured_outputs``, with one of its fields."""

    json_: JsonObject | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: ListedChoices | None = None
    grammar: str | None = None
    """Grammar in Lark's notation."""
    json_object: bool | None = None
    disable_additional_properties: Literal[False] = False
    """Only False is allowed: the schema itself says what it allows."""
    whitespace_pattern: None = None
    """Only null is allowed: the layout of JSON is fixed."""
    structural_tag: Unsupported = None


class GenerationBody(Body):
    """Common fields of chats and completions."""

    model: str = Field(default="", max_length=512)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES_PER_PROMPT)
    stop: StopText | Annotated[list[StopText], Field(fail_fast=True, max_length=4)] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: Int64 | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=_INT31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=LEAST_REPETITION_PENALTY, le=100)
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024), at_most(1024)] = Field(default_factory=dict)
    min_tokens: int = Field(default=0, ge=0, le=_INT31)
    ignore_eos: bool = False
    stop_token_ids: list[TokenId] = Field(default_factory=list, fail_fast=True, max_length=128)
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    include_stop_str_in_output: bool = False
    service_tier: ServiceTier = "auto"
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    ttft_slo_ms: TargetMs | None = None
    tpot_slo_ms: TargetMs | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: ListedChoices | None = None
    guided_grammar: str | None = None
    regex: Unsupported = None
    ebnf: Unsupported = None
    grammar: Unsupported = None
    guided_whitespace_pattern: Unsupported = None
    json_schema: Unsupported = None
    logits_processors: Unsupported = None
    use_beam_search: Unsupported = None
    prompt_embeds: Unsupported = None
    bad_words: Unsupported = None
    allowed_token_ids: Unsupported = None
    prompt_logprobs: Unsupported = None
    truncate_prompt_tokens: Unsupported = None
    logprob_token_ids: Unsupported = None
    return_tokens_as_token_ids: Unsupported = None
    return_prompt_text: Unsupported = None
    repetition_detection: Unsupported = None
    thinking_token_budget: Unsupported = None
    watermarking: Unsupported = None
    stop_regex: Unsupported = None
    no_stop_trim: Unsupported = None
    lora_path: Unsupported = None
    custom_logit_processor: Unsupported = None
    return_hidden_states: Unsupported = None


class ContentPart(Body):
    """One part of a message in list form; ``text.messages`` refuses other types than text."""

    type: str = Field(max_length=64)
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


class FunctionCall(Body):
    """The function of an earlier tool call."""

    name: str = Field(max_length=256)
    arguments: str | JsonObject = ""


class ToolCallParam(Body):
    """A tool call that the assistant made earlier."""

    id: str = Field(default="", max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[str | ContentPart], Field(fail_fast=True)] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = Field(default=None, max_length=256)
    tool_calls: list[ToolCallParam] = Field(default_factory=list, fail_fast=True, max_length=128)
    function_call: FunctionCall | None = None
    """A call in the form that came before ``tool_calls``."""
    audio: Unsupported = None
    tool_call_id: str | None = Field(default=None, max_length=256)


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """An entry of ``tools``."""

    type: Literal["function"]
    function: FunctionDefinition


class ToolChoiceFunction(Body):
    """The function of a forced choice."""

    name: str = Field(max_length=64)


class ToolChoiceObject(Body):
    """A forced choice."""

    type: str = Field(max_length=64)
    function: ToolChoiceFunction | None = None


class Conversation(Body):
    """Input of a chat template."""

    messages: list[ChatMessage] = Field(fail_fast=True, min_length=1, max_length=65_536)
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=128)] | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    """For the chat template, which decides what comes of it."""
    continue_final_message: bool | Literal["content", "reasoning_content", "reasoning", "thinking"] = False
    """Whether the prompt ends with the last message, or the field of that message that it ends with."""
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    chat_template: str | None = None
    """Name of one of the model's own templates."""


class ChatBody(GenerationBody, Conversation):
    """Body of ``POST /v1/chat/completions``."""

    max_tokens: int | None = Field(default=None, ge=1, le=_INT31)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_INT31)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceObject | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    documents: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    moderation: Unsupported = None
    web_search_options: Unsupported = None
    echo: Unsupported = None
    suffix: Unsupported = None
    add_special_tokens: Unsupported = None
    modalities: list[str] = Field(default_factory=list, fail_fast=True, max_length=8)


class CompletionBody(GenerationBody):
    """Body of ``POST /v1/completions``."""

    prompt: (
        str | Annotated[list[str], Field(fail_fast=True)] | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    )
    max_tokens: int = Field(default=16, ge=0, le=_INT31)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False
    add_special_tokens: bool = True
    best_of: int | None = Field(default=None, ge=0, le=20)
    suffix: str | None = None
    max_completion_tokens: Unsupported = None
    top_logprobs: Unsupported = None
    tools: Unsupported = None
    functions: Unsupported = None
    chat_template: Unsupported = None
    chat_template_kwargs: Unsupported = None
    continue_final_message: Unsupported = None
    reasoning_effort: Unsupported = None


class TokenizeTextBody(Body):
    """Body of ``POST /tokenize`` with a text."""

    model: str = Field(default="", max_length=512)
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(Conversation):
    """Body of ``POST /tokenize`` with a conversation."""

    model: str = Field(default="", max_length=512)
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """Body of ``POST /detokenize``."""

    model: str = Field(default="", max_length=512)
    tokens: TokenIds


class WhatIfBody(Body):
    """Body of ``POST /admin/what-if``."""

    minutes: float = Field(default=60.0, gt=0, le=60)
    """Length of the recorded traffic, counted back from now."""
    traffic: float = Field(default=1.0, ge=0.1, le=20)
    """Factor on the number of online requests in the same time."""
    ttft_ms: float | None = Field(default=None, gt=0, le=3_600_000)
    tpot_ms: float | None = Field(default=None, gt=0, le=3_600_000)
    """Latency targets; by default the server's."""
    profile: str | None = Field(default=None, min_length=1, max_length=100)
    """Name of another device's profile."""
    attainment: float = Field(default=0.9, gt=0, le=1)
    """Share of the requests that must meet both targets, for the number of replicas."""


class QuoteBody(Body):
    """Body of ``POST /v1/batches/quote``: a file, or the size of a batch."""

    input_file_id: str | None = Field(default=None, max_length=64)
    lines: int | None = Field(default=None, ge=1, le=1_000_000)
    """Number of lines, instead of a file."""
    input_tokens: int = Field(default=500, ge=1, le=10_000_000)
    """Prompt tokens of each line."""
    shared_tokens: int = Field(default=0, ge=0, le=10_000_000)
    """Number of first prompt tokens that all lines share."""
    max_tokens: int = Field(default=1024, ge=1, le=10_000_000)
    """Most tokens of each answer."""
    output_tokens: float | None = Field(default=None, gt=0, le=10_000_000)
    """Expected tokens of an answer; by default what the server has learnt."""


class OfflineSwitchBody(Body):
    """Body of ``POST /admin/offline``."""

    state: Literal["running", "paused"]
