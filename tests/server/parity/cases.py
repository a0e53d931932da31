"""Values of every field, each such that it shows whether the field is taken."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_type_hints

from neaptide.server.openai.endpoints import CHAT, COMPLETIONS, RESPONSES
from tests.server.parity.asking import ALIAS, ANSWER, OTHER_TEMPLATE, THOUGHT
from tests.server.parity.client_fields import fields_of, forms, literals, sample

GENERATION = (CHAT, COMPLETIONS, RESPONSES)
UPLOAD, FILES, CREATE, BATCHES = "POST /v1/files", "GET /v1/files", "POST /v1/batches", "GET /v1/batches"
OMITTED: Any = object()

_ASKED = "What is 2+2?"
_USER = {"role": "user", "content": _ASKED}
PLAIN: Mapping[str, Mapping[str, Any]] = {
    CHAT: {"messages": [_USER], "max_tokens": 40},
    COMPLETIONS: {"prompt": _ASKED},
    RESPONSES: {"input": _ASKED, "max_output_tokens": 40},
}
"""The request that a field is added to."""
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
_F = {"name": "f", "parameters": _SCHEMA}
_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


class ByCall(NamedTuple):
    """A value that differs between calls."""

    of: Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A field with a value, and the pair of requests that shows what comes of it."""

    field: str
    value: Any
    calls: tuple[str, ...] = GENERATION
    beside: Any = field(default_factory=dict)
    """Further fields of both requests."""
    instead: Any = OMITTED
    """The field's value in the other request."""
    says: str = ANSWER
    wrong: Any = OMITTED
    """A value that is refused if the field is read, where its effect comes after the reply."""
    shown: str = ""
    """Form of the value on the page."""
    why: str = ""
    """Why it is right to ignore it."""

    def sent(self, call: str) -> Any:
        """The field's value."""
        return self.value.of(call) if isinstance(self.value, ByCall) else self.value

    def requests(self, call: str) -> list[dict[str, Any]]:
        """The requests without and with the field, and one with a wrong value of it."""
        beside = self.beside.of(call) if isinstance(self.beside, ByCall) else self.beside
        plain = {**PLAIN.get(call, {}), **(beside if call in self.calls else {})}
        asked = {**plain, self.field: self.sent(call)}
        found = [plain if self.instead is OMITTED else {**plain, self.field: self.instead}, asked]
        return found if self.wrong is OMITTED else [*found, {**plain, self.field: self.wrong}]


def _tools_of(call: str) -> list[Any]:
    return [{"type": "function", **_F}] if call == RESPONSES else [{"type": "function", "function": _F}]


_TOOLS = ByCall(lambda call: {"tools": _tools_of(call)})
_STREAMED = {"stream": True}
_PREFIXES = "Prefixes are cached without it."
_TENANTS = "The API key says who calls."
_NOT_STORED = "Nothing is stored."
_ONE_MODEL = "OpenAI's own."
_CHAT_RESPONSES = (CHAT, RESPONSES)

OPENAI = [
    Case("messages", [{"role": "user", "content": "Hi"}], shown="a list"),
    Case(
        "prompt",
        ByCall(lambda call: {"id": "p"} if call == RESPONSES else "Hi"),
        shown="a text; in responses an object",
    ),
    Case("input", "Hi"),
    Case("model", ALIAS, shown="another served name"),
    Case("access_programs", {"cyber": "standard"}, calls=(RESPONSES,), why=_ONE_MODEL),
    Case("audio", {"voice": "alloy", "format": "mp3"}),
    Case("background", True, calls=(RESPONSES,)),
    Case("best_of", 2, calls=(COMPLETIONS,)),
    Case("context_management", [{"type": "compaction"}], calls=(RESPONSES,)),
    Case("conversation", "conv_1", calls=(RESPONSES,)),
    Case("echo", True),
    Case("frequency_penalty", 0.5),
    Case("function_call", "auto", calls=_CHAT_RESPONSES),
    Case("functions", [{"name": "f"}]),
    Case("image", {"context_compression": "auto"}, calls=(RESPONSES,), why="Only text is read."),
    Case("include", ["message.output_text.logprobs"], calls=(RESPONSES,)),
    Case("instructions", "Be brief.", calls=(RESPONSES,)),
    Case("logit_bias", {"7": 5}),
    Case("logprobs", ByCall(lambda call: 2 if call == COMPLETIONS else True), shown="`true`; in completions `2`"),
    Case("max_completion_tokens", 3),
    Case("max_output_tokens", 3, calls=(RESPONSES,)),
    Case("max_tokens", 3),
    Case("max_tool_calls", 1, calls=(RESPONSES,), why="It counts calls of OpenAI's own tools."),
    Case("metadata", {"a": "b"}, calls=_CHAT_RESPONSES, why=_NOT_STORED),
    Case("modalities", ["text", "audio"], calls=_CHAT_RESPONSES),
    Case("moderation", {"model": "omni-moderation-latest"}, calls=_CHAT_RESPONSES),
    Case("n", 2),
    Case("parallel_tool_calls", False, beside=_TOOLS, says=_CALL * 2, calls=_CHAT_RESPONSES),
    Case("prediction", {"type": "content", "content": "Yes"}, calls=(CHAT,), why="It changes the speed only."),
    Case("presence_penalty", 0.5),
    Case("previous_response_id", "resp_1", calls=(RESPONSES,)),
    Case("prompt_cache_key", "k", calls=_CHAT_RESPONSES, why=_PREFIXES),
    Case("prompt_cache_options", {"mode": "implicit"}, calls=_CHAT_RESPONSES, why=_PREFIXES),
    Case("prompt_cache_retention", "24h", calls=_CHAT_RESPONSES, why=_PREFIXES),
    Case("reasoning", {"effort": "low"}, calls=(RESPONSES,)),
    Case("reasoning", {"summary": "auto"}, calls=(RESPONSES,), why="Reasoning comes whole."),
    Case("reasoning_effort", "low"),
    Case("response_format", {"type": "json_object"}),
    Case("safety_identifier", "s", calls=_CHAT_RESPONSES, why=_TENANTS),
    Case("seed", 7),
    Case("service_tier", "flex"),
    Case("stop", "no"),
    Case("store", True, calls=_CHAT_RESPONSES, why=_NOT_STORED),
    Case("stream", True),
    Case("stream_options", {"include_usage": True}, beside=_STREAMED, why="Usage stands in the last event."),
    Case("stream_options", {"include_obfuscation": True}, beside=_STREAMED, why="Nothing is padded."),
    Case("suffix", "!"),
    Case("temperature", 0.5),
    Case("text", {"format": {"type": "json_object"}}, calls=(RESPONSES,)),
    Case("text", {"verbosity": "low"}, calls=(RESPONSES,), why=_ONE_MODEL),
    Case("tool_choice", "none", beside=_TOOLS, calls=_CHAT_RESPONSES),
    Case("tools", ByCall(_tools_of), shown="a function"),
    Case("top_logprobs", 2, beside=ByCall(lambda call: {"logprobs": True} if call == CHAT else {})),
    Case("top_p", 0.5),
    Case("truncation", "auto", calls=(RESPONSES,)),
    Case("user", "u", why=_TENANTS),
    Case("verbosity", "low", calls=(CHAT,), why=_ONE_MODEL),
    Case("web_search_options", {}, calls=_CHAT_RESPONSES),
]

_ALONE = "Only of use with another field that is refused."
_RUNS_ALONE = "For engines that share work."
OTHERS = [
    Case("add_generation_prompt", False, calls=_CHAT_RESPONSES),
    Case("add_special_tokens", ByCall(lambda call: call != COMPLETIONS)),
    Case("allowed_token_ids", [7]),
    Case("bad_words", ["no"]),
    Case("cache_salt", "salt"),
    Case("chat_template", OTHER_TEMPLATE, shown="the name of one of its templates"),
    Case("chat_template_kwargs", {"mood": "dark"}),
    Case("continue_final_message", True, beside=ByCall(lambda call: _to_continue() if call == CHAT else {})),
    Case("custom_logit_processor", "x"),
    Case("documents", [{"text": "x"}], calls=_CHAT_RESPONSES),
    Case("ebnf", 'root ::= "a"'),
    Case("grammar", 'root ::= "a"'),
    Case("guided_choice", ["a", "b"]),
    Case("guided_grammar", 'start: "a"'),
    Case("guided_json", _SCHEMA, shown="a schema"),
    Case("guided_regex", "a+"),
    Case("guided_whitespace_pattern", " *"),
    Case("ignore_eos", True),
    Case("include_reasoning", False, says=THOUGHT + ANSWER, calls=_CHAT_RESPONSES),
    Case("include_stop_str_in_output", True, beside=ByCall(lambda call: {} if call == RESPONSES else {"stop": "no"})),
    Case("json_schema", "{}"),
    Case("kv_transfer_params", {"a": 1}, why=_RUNS_ALONE),
    Case("length_penalty", 2.0, why=_ALONE),
    Case("logits_processors", ["x"]),
    Case("logprob_token_ids", [7]),
    Case("lora_path", "x"),
    Case("min_p", 0.5),
    Case("min_tokens", 2),
    Case("mm_processor_kwargs", {"a": 1}, why="Only text is read."),
    Case("no_stop_trim", True),
    Case("priority", 1, why="Tiers are the only order that callers choose."),
    Case("prompt_embeds", "x"),
    Case("prompt_logprobs", 1),
    Case("regex", "a"),
    Case("repetition_detection", {"max_pattern_size": 3}),
    Case("repetition_penalty", 1.5),
    Case("request_id", "r", why="The header `x-request-id` is taken."),
    Case("return_hidden_states", True),
    Case("return_prompt_text", True),
    Case("return_token_ids", True),
    Case("return_tokens_as_token_ids", True),
    Case("session_id", "s", why="Prefixes are found without it."),
    Case("skip_special_tokens", False),
    Case("spaces_between_special_tokens", False, why="None are written."),
    Case("stop_regex", "a"),
    Case("stop_token_ids", [7]),
    Case("stream_interval", 2, beside=_STREAMED, why="There is one event per step of the engine."),
    Case("structured_outputs", {"regex": "a+"}),
    Case("thinking_token_budget", 5),
    Case("top_k", 5),
    Case("tpot_slo_ms", 100),
    Case("truncate_prompt_tokens", 5),
    Case("truncation_side", "left", why=_ALONE),
    Case("ttft_slo_ms", 100),
    Case("use_beam_search", True),
    Case("vllm_xargs", {"a": 1}, why="For plugins of vLLM."),
    Case("watermarking", True),
]


def _to_continue() -> dict[str, Any]:
    return {"messages": [_USER, {"role": "assistant", "content": "Four"}]}


# ---- forms of values --------------------------------------------------------------------------------------

_OF_MESSAGES: Mapping[str, Any] = {
    "audio": {"id": "audio_1"},
    "function_call": {"name": "f", "arguments": "{}"},
    "name": "n",
    "refusal": "x",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
"""Values of the fields of a message."""
_GIVEN: Mapping[str, Mapping[str, Any]] = {
    "message": {"role": "user", "content": "Hi"},
    "assistant": {"content": "x"},
    "input_text": {"text": "x"},
    "text": {"text": "x"},
    "refusal": {"refusal": "x"},
    "reasoning": {"content": [{"type": "reasoning_text", "text": "x"}]},
    "function_call_output": {"call_id": "c", "output": "x"},
}
"""Fields that give a form of a value something to do."""


class Form(NamedTuple):
    """One form of a value."""

    place: str
    name: str
    case: Case


def forms_of_values() -> Iterator[Form]:
    """Every form that the client has for the values of structured fields."""
    yield from _forms_of_messages()
    for kind, shape in forms(fields_of(CHAT)["response_format"], "type").items():
        given = {"json_schema": {"name": "n", "schema": _SCHEMA}} if kind == "json_schema" else {}
        value = sample(shape, given) | {"type": kind}
        instead = {"type": "json_object" if kind == "text" else "text"}
        yield Form("response_format.type", kind, Case("response_format", value, calls=(CHAT,), instead=instead))
    for call in _CHAT_RESPONSES:
        for tier in literals(fields_of(call)["service_tier"]):
            instead_of = "flex" if tier != "flex" else "default"
            yield Form("service_tier", tier, Case("service_tier", tier, calls=(call,), instead=instead_of))
        yield from _forms_of_tools(call)
    said = [{"type": "message", **_USER}]
    for kind, shape in forms(fields_of(RESPONSES)["input"], "type").items():
        item = sample(shape, _GIVEN.get(kind, {})) | {"type": kind}
        yield Form("input[].type", kind, Case("input", [*said, item], calls=(RESPONSES,), instead=said))
    for name in literals(fields_of(RESPONSES)["include"]):
        yield Form("include[]", name, Case("include", [name], calls=(RESPONSES,), why="Reasoning comes as text."))


def _forms_of_messages() -> Iterator[Form]:
    for role, shape in forms(fields_of(CHAT)["messages"], "role").items():
        message = sample(shape, _GIVEN.get(role, {})) | {"role": role}
        yield Form("messages[].role", role, Case("messages", _talk(message), calls=(CHAT,)))
        hints = get_type_hints(shape)
        for name in sorted(_OF_MESSAGES.keys() & hints.keys() - message.keys()):
            plain = {key: value for key, value in message.items() if name != "refusal" or key != "content"}
            asked = _talk({**plain, name: _OF_MESSAGES[name]})
            yield Form(f"messages[] of {role}", name, Case("messages", asked, calls=(CHAT,), instead=_talk(plain)))
        for kind, part in forms(hints["content"], "type").items():
            content = [sample(part, _GIVEN.get(kind, {})) | {"type": kind}]
            case = Case("messages", _talk({**message, "content": content}), calls=(CHAT,))
            yield Form(f"messages[].content[].type of {role}", kind, case)


def _talk(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [message, _USER] if message["role"] in ("system", "developer") else [_USER, message]


def _forms_of_tools(call: str) -> Iterator[Form]:
    fields = fields_of(call)
    for kind, shape in forms(fields["tools"], "type").items():
        tool = _tools_of(call)[0] if kind == "function" else sample(shape, {}) | {"type": kind}
        yield Form("tools[].type", kind, Case("tools", [tool], calls=(call,)))
    for choice in ("none", "auto", "required"):
        instead = "required" if choice != "required" else "none"
        yield Form("tool_choice", choice, Case("tool_choice", choice, calls=(call,), beside=_TOOLS, instead=instead))
    for kind, shape in forms(fields["tool_choice"], "type").items():
        chosen = sample(shape, {}) | {"type": kind}
        if kind == "function":
            chosen |= {"name": "f"} if call == RESPONSES else {"function": {"name": "f"}}
        yield Form("tool_choice.type", kind, Case("tool_choice", chosen, calls=(call,), beside=_TOOLS))


# ---- files and batches ------------------------------------------------------------------------------------

_FILE = ("in.jsonl", b"{}\n")
_A_DAY_S = 86_400


def stored_forms(file_id: str, batch_id: str) -> Iterator[Form]:
    """Forms of the fields of files and batches. The ids are those of the newest file and batch."""
    for call, case in _stored_cases(file_id, batch_id):
        name = "" if case.shown else str(case.value)
        yield Form(case.shown or case.field, name, replace(case, calls=(call,)))


def _stored_cases(file_id: str, batch_id: str) -> Iterator[tuple[str, Case]]:
    upload = {"file": _FILE, "purpose": "user_data"}
    yield UPLOAD, Case("file", _FILE, beside={"purpose": "user_data"}, shown="file")
    for purpose in literals(fields_of(UPLOAD)["purpose"]):
        instead = "user_data" if purpose != "user_data" else "batch"
        yield UPLOAD, Case("purpose", purpose, beside=upload, instead=instead)
    upload = upload | {"expires_after[anchor]": "created_at"}
    yield UPLOAD, Case("expires_after[seconds]", str(_A_DAY_S), beside=upload, instead="7200", shown="expires_after")
    for call, newest in ((FILES, file_id), (BATCHES, batch_id)):
        yield call, Case("limit", 1, shown="limit")
        yield call, Case("after", newest, shown="after")
    yield FILES, Case("order", "asc", shown="order")
    yield FILES, Case("purpose", "batch", shown="purpose")
    create = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    for name in ("input_file_id", "completion_window"):
        beside = {key: value for key, value in create.items() if key != name}
        yield CREATE, Case(name, create[name], beside=beside, shown=name)
    for endpoint in literals(fields_of(CREATE)["endpoint"]):
        instead = CHAT if endpoint != CHAT else RESPONSES
        yield CREATE, Case("endpoint", endpoint, beside=create, instead=instead)
    yield CREATE, Case("metadata", {"a": "b"}, beside=create, shown="metadata")
    expiry = {"anchor": "created_at", "seconds": _A_DAY_S}
    wrong = expiry | {"seconds": 1}
    yield CREATE, Case("output_expires_after", expiry, beside=create, wrong=wrong, shown="output_expires_after")
