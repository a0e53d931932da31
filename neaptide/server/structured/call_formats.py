"""Formats of function calls of the model families, used by the parser and by the grammar of forced calls.

A model was trained on one of them, which its chat template shows.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Format of a call, which is an object with the function's name and its arguments."""

    name: str
    template_marks: tuple[str, ...]
    """Texts of which one is in the chat template of a model with this format."""
    begin: str
    """Text that begins a call, or the list of calls; empty if calls are the whole output."""
    end: str
    """Text that ends it; empty if only the end of the output does."""
    arguments_key: str = "arguments"
    padding: str = ""
    """White space between ``begin``, a call and ``end``, as models write it; the parser accepts any."""
    separator: str = ""
    """Text between calls."""
    is_list: bool = False
    """Whether all calls are in one list after one ``begin``."""


HERMES = CallFormat("hermes", ("<tool_call>",), "<tool_call>", "</tool_call>", padding="\n", separator="\n")
"""Also the format of Qwen."""
MISTRAL = CallFormat("mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]", "", separator=", ", is_list=True)
LLAMA = CallFormat(
    "llama-3",
    ("<|python_tag|>", '"parameters": dictionary'),
    "",
    "",
    arguments_key="parameters",
    separator="; ",
)
FORMATS = (HERMES, MISTRAL, LLAMA)


def format_of(template: str | None) -> CallFormat:
    """The format in a chat template; Hermes' if it has none."""
    source = template or ""
    return next((form for form in FORMATS if any(mark in source for mark in form.template_marks)), HERMES)
