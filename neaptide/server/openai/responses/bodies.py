"""Body of ``POST /v1/responses``; see ``openai.schemas``."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from neaptide.server.openai.schemas import (
    MAX_TOP_LOGPROBS,
    Body,
    Int64,
    JsonObject,
    ServiceTier,
    TargetMs,
    TemplateVariables,
    Unsupported,
    at_most,
)

_INT31 = (1 << 31) - 1


class ItemPart(Body):
    """A part of an item's content; only text is supported."""

    type: str = Field(max_length=64)
    text: str | None = None
    refusal: str | None = None


ItemParts = Annotated[list[ItemPart], Field(fail_fast=True)]


class InputItem(Body):
    """An entry of ``input``: a message, a call that the model made, a call's result, or the model's reasoning."""

    type: str = Field(default="message", max_length=64)
    role: Literal["system", "developer", "user", "assistant"] | None = None
    status: str | None = Field(default=None, max_length=64)
    content: str | ItemParts | None = None
    summary: ItemParts = Field(default_factory=list)
    encrypted_content: str | None = None
    call_id: str | None = Field(default=None, max_length=256)
    name: str | None = Field(default=None, max_length=256)
    arguments: str = ""
    output: str | ItemParts | None = None


class TextFormat(Body):
    """Format of the output: ``text.format``. Other fields than these are refused: they would change the output."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(max_length=64)
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Options of the output: ``text``."""

    format: TextFormat | None = None


class FunctionTool(Body):
    """An entry of ``tools``; only functions are supported."""

    type: str = Field(max_length=64)
    name: str = Field(default="", max_length=64)
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class NamedChoice(Body):
    """A forced choice."""

    type: str = Field(max_length=64)
    name: str = Field(default="", max_length=64)


class FieldsOfChats(Body):
    """Fields of chats that this API lacks or names differently. Ignoring them would change the output, so they are
    refused."""

    response_format: Unsupported = None
    max_tokens: Unsupported = None
    max_completion_tokens: Unsupported = None
    logprobs: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    structured_outputs: Unsupported = None
    guided_json: Unsupported = None
    guided_regex: Unsupported = None
    guided_choice: Unsupported = None
    guided_grammar: Unsupported = None
    guided_whitespace_pattern: Unsupported = None
    regex: Unsupported = None
    ebnf: Unsupported = None
    grammar: Unsupported = None
    n: Unsupported = None
    stop: Unsupported = None
    stop_token_ids: Unsupported = None
    min_tokens: Unsupported = None
    ignore_eos: Unsupported = None
    min_p: Unsupported = None
    presence_penalty: Unsupported = None
    frequency_penalty: Unsupported = None
    repetition_penalty: Unsupported = None
    logit_bias: Unsupported = None


class ResponsesBody(FieldsOfChats):
    """Body of ``POST /v1/responses``. Nothing is stored, whatever ``store`` says."""

    model: str = Field(default="", max_length=512)
    input: str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=65_536)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=_INT31)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=_INT31)
    seed: Int64 | None = None
    stream: bool = False
    text: TextOptions | None = None
    tools: list[FunctionTool] = Field(default_factory=list, fail_fast=True, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool = True
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    include: list[str] = Field(default_factory=list, fail_fast=True, max_length=16)
    metadata: Annotated[dict[str, str], Field(max_length=16), at_most(16)] = Field(default_factory=dict)
    service_tier: ServiceTier = "auto"
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    ttft_slo_ms: TargetMs | None = None
    tpot_slo_ms: TargetMs | None = None
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    truncation: Literal["auto", "disabled"] = "disabled"
    store: bool | None = None
    previous_response_id: Unsupported = None
    conversation: Unsupported = None
    prompt: Unsupported = None
    background: Any = False
