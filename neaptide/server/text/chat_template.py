"""Chat templates of a model: untrusted code from a model directory, rendered in Jinja's sandbox."""

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from neaptide.server.http.errors import ContextLengthError, InvalidRequestError
from neaptide.server.text.plain_templates import is_plain

Message = Mapping[str, Any]

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of the template of plain conversations, and of the one with tools, where a model has several."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates read a message's reasoning. Clients send one of them."""
_CONTINUE = "continue_final_message"
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""Form of tool call ids that Mistral's templates insist on."""


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` block, which marks text for training masks. For serving, its body is plain template."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` of the sandbox, without names that reach the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        names = dict(*rest, **kwargs)
        for name in names:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the name {name!r}")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


class _RefusalError(TemplateError):
    """A conversation that the template itself refuses."""


def _raise_exception(message: str) -> NoReturn:
    raise _RefusalError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which no model has seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment(strftime_now: Callable[[str], str] = _strftime_now) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": strftime_now,
        "namespace": _Namespace,
        "dict": _dict,
    }
    return environment


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateInput:
    """Input of a chat template, of JSON types alone."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continued: str | None = None
    """Field of the last message that the prompt ends with; None to end it as the template does."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    max_chars: int = 1 << 25


class ChatTemplate:
    """Renders conversations like Hugging Face's ``apply_chat_template``.

    Raises:
        ValueError: the source is not a template.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        strftime_now: Callable[[str], str] = _strftime_now,
    ) -> None:
        self.source = source
        try:
            self._template = _environment(strftime_now).from_string(source)
        except (TemplateError, RecursionError) as error:
            raise ValueError(f"the model's chat template cannot be used: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._facts = TemplateFacts(source)

    def render(self, given: TemplateInput) -> str:
        """The prompt text.

        Raises:
            InvalidRequestError: the template refuses the conversation, or drops the text to continue.
            ContextLengthError: the text is longer than the conversation's limit.
        """
        messages = [_with_reasoning(message) for message in self._in_its_forms(given.messages)]
        if given.continued is not None:
            # A space behind the tag shows whether the template trims the message.
            tag = f"{secrets.token_hex(16)} "
            messages[-1], final = _tagged(messages[-1], given.continued, tag)
            return _cut_behind(final, tag, self._rendered(messages, given))
        return self._rendered(messages, given)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template reads a text in parts like the same text alone."""
        texts = []
        for content in ("a", [{"type": "text", "text": "a"}]):
            try:
                texts.append(self._once([{"role": "user", "content": content}], TemplateInput(messages=[])))
            except InvalidRequestError:
                return False
        return texts[0] == texts[1]

    def _in_its_forms(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with content and roles that the template knows, as vLLM converts them."""
        changed = list(messages)
        if any(isinstance(message["content"], list) for message in changed) and not self._takes_parts:
            changed = [{**message, "content": _joined(message["content"])} for message in changed]
        if any(message["role"] == "developer" for message in changed) and not self._facts.knows_developers:
            changed = _with_one_system_message(changed)
        return changed

    def _rendered(self, messages: Sequence[Message], given: TemplateInput) -> str:
        """The text. What a template refuses because of its tool calls is tried again in the forms that others want."""
        try:
            return self._once(messages, given)
        except ContextLengthError:
            raise
        except InvalidRequestError:
            for form in (_with_short_ids, _with_text_arguments, _with_both):
                changed = form(messages)
                if changed is not None:
                    with contextlib.suppress(InvalidRequestError):
                        return self._once(changed, given)
            raise

    def _once(self, messages: Sequence[Message], given: TemplateInput) -> str:
        pieces: list[str] = []
        total = 0
        names = {
            **self._special_tokens,
            **given.variables,
            "messages": list(messages),
            "tools": given.tools,
            "documents": None,
            "add_generation_prompt": given.add_generation_prompt,
        }
        try:
            for piece in self._template.generate(**names):
                pieces.append(piece)
                total += len(piece)
                if total > given.max_chars:
                    raise ContextLengthError("The conversation is longer than the model's context.", param="messages")
        except ContextLengthError:
            raise
        except Exception as error:
            # Expressions may raise any error, and its text may quote the conversation. A text of the template's own,
            # such as that roles must alternate, does not.
            reason = str(error) if isinstance(error, _RefusalError) else ""
            told = f": {reason}" if reason in self._facts.texts else "."
            raise InvalidRequestError(
                f"The model's chat template does not accept this conversation{told}",
                param="messages",
                code="invalid_value",
            ) from None
        return "".join(pieces)


class TemplateFacts:
    """Facts about a template, from its syntax tree alone: nothing of it runs.

    Raises:
        ValueError: the source is not a template.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        try:
            self._tree = _environment().parse(source)
        except (TemplateError, RecursionError) as error:
            raise ValueError(f"the model's chat template cannot be used: {error}") from error

    @cached_property
    def names(self) -> frozenset[str]:
        """Variables that the template reads."""
        return frozenset(node.name for node in self._tree.find_all(jinja2.nodes.Name) if node.ctx == "load")

    @property
    def is_plain(self) -> bool:
        """Whether rendering is known to take time and memory in proportion to the input."""
        return is_plain(self._tree, len(self.source))

    @property
    def shows_tools(self) -> bool:
        """Whether the model gets to see offered tools."""
        return "tools" in self.names

    @cached_property
    def texts(self) -> frozenset[str]:
        """The texts that the template itself writes or compares with."""
        texts = [node.data for node in self._tree.find_all(jinja2.nodes.TemplateData)]
        texts += [node.value for node in self._tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)]
        return frozenset(filter(None, texts))

    @property
    def literals(self) -> str:
        """All these texts, joined by null characters."""
        return "\0".join(sorted(self.texts))

    @property
    def knows_developers(self) -> bool:
        """Whether the template has a form for the role ``developer``."""
        return "developer" in self.texts


# ---- the final message ------------------------------------------------------------------------------------


def _tagged(message: Message, name: str, tag: str) -> tuple[dict[str, Any], str]:
    """The message with ``tag`` at the end of a field, which the prompt is cut at; and the text in front of it.

    Raises:
        InvalidRequestError: the field has no text.
    """
    value = message.get(name)
    if isinstance(value, list):
        final = value[-1]["text"]
        return {**message, name: [*value[:-1], {**value[-1], "text": final + tag}]}, final
    if not isinstance(value, str):
        raise InvalidRequestError("The final message lacks the text to continue.", param=_CONTINUE)
    names = REASONING_FIELDS if name in REASONING_FIELDS else (name,)
    return {**message, **dict.fromkeys(names, value + tag)}, value


def _cut_behind(final: str, tag: str, text: str) -> str:
    """The prompt up to the tag. A text that the template does not show as it is cannot be continued.

    Raises:
        InvalidRequestError: the template drops the text or a part of it.
    """
    place = text.rfind(tag.strip())
    if place < 0 or final.strip() not in text:
        raise InvalidRequestError("The model's chat template drops a part of the text to continue.", param=_CONTINUE)
    if text.startswith(tag, place):
        return text[:place]
    return text[:place].rstrip()  # The template trims messages.


# ---- forms of a history -----------------------------------------------------------------------------------


def _with_reasoning(message: Message) -> Message:
    """The message with its reasoning under every name that templates read."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {**message, **dict.fromkeys(REASONING_FIELDS, reasoning)}


def _joined(content: str | Sequence[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _with_one_system_message(messages: Sequence[Message]) -> list[Message]:
    """The messages with developers as the system. Several system messages become one at the start: many templates
    refuse them elsewhere."""
    changed = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    texts = [_joined(message["content"]) for message in changed if message["role"] == "system"]
    rest = [message for message in changed if message["role"] != "system"]
    is_first_alone = len(texts) == 1 and changed[0]["role"] == "system"
    return changed if is_first_alone else [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *rest]


def _with_short_ids(messages: Sequence[Message]) -> Sequence[Message] | None:
    """The messages with tool call ids of nine characters, equal ones for equal ones; None if they have them already."""
    short: dict[str, str] = {}

    def shortened(name: str) -> str:
        if name not in short:
            kept = re.sub("[^a-zA-Z0-9]", "", name)[-9:]
            short[name] = kept if len(kept) == 9 and kept not in short.values() else f"{len(short):09d}"
        return short[name]

    changed: list[Message] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [{**call, "id": shortened(call["id"])} for call in message["tool_calls"]]
            changed.append({**message, "tool_calls": calls})
        elif isinstance(message.get("tool_call_id"), str):
            changed.append({**message, "tool_call_id": shortened(message["tool_call_id"])})
        else:
            changed.append(message)
    return None if all(map(_SHORT_ID.fullmatch, short)) else changed


def _with_text_arguments(messages: Sequence[Message]) -> Sequence[Message] | None:
    """The messages with arguments of tool calls as text; None if there are none."""

    def as_text(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": _tojson(function["arguments"])}}

    if not any(message.get("tool_calls") for message in messages):
        return None
    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_both(messages: Sequence[Message]) -> Sequence[Message] | None:
    changed = _with_short_ids(messages)
    return None if changed is None else _with_text_arguments(changed)
