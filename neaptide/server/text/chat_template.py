"""Chat template of a model: untrusted code from a model directory, rendered in Jinja's sandbox."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from neaptide.server.http.errors import ContextLengthError, InvalidRequestError

Message = Mapping[str, Any]


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` block, which marks text for training masks. For serving, its body is plain template."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which no model has seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """Renders conversations like Hugging Face's ``apply_chat_template``.

    Raises:
        ValueError: the source is not a template.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        strftime_now: Callable[[str], str] = lambda form: datetime.now().strftime(form),
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = strftime_now
        self.source = source
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise ValueError(f"the model's chat template cannot be used: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        max_chars: int,
    ) -> str:
        """The prompt text.

        Raises:
            InvalidRequestError: the template refuses the conversation.
            ContextLengthError: the text has more than ``max_chars`` characters.
        """
        pieces: list[str] = []
        total = 0
        names = {**self._special_tokens, **variables, "messages": list(messages), "tools": tools, "documents": None}
        try:
            for piece in self._template.generate(**names, add_generation_prompt=add_generation_prompt):
                pieces.append(piece)
                total += len(piece)
                if total > max_chars:
                    raise ContextLengthError("The conversation is longer than the model's context.", param="messages")
        except ContextLengthError:
            raise
        except Exception:
            # Expressions may raise any error, and its text may quote the conversation, so it is not passed on.
            raise InvalidRequestError(
                "The model's chat template does not accept this conversation.", param="messages", code="invalid_value"
            ) from None
        return "".join(pieces)
