"""How families of models write calls of functions. Data: the parser reads it, and so does the grammar of forced calls.

A model was trained on one of them, and its chat template says which.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A call is an object with the function's name and its arguments."""

    name: str
    template_marks: tuple[str, ...]
    """One of them stands in the chat template of a model that writes so."""
    begin: str
    """What begins a call, or the list of them; empty where calls are the whole output."""
    end: str
    """What ends it; empty where only the output's end does."""
    arguments_key: str = "arguments"
    padding: str = ""
    """White space between ``begin``, a call and ``end``, as models write it; any is read."""
    separator: str = ""
    """Between calls."""
    is_list: bool = False
    """All calls stand in one list behind one ``begin``."""


HERMES = CallFormat("hermes", ("<tool_call>",), "<tool_call>", "</tool_call>", padding="\n", separator="\n")
"""Also Qwen's."""
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
    """The format that a chat template teaches; Hermes' where it teaches none."""
    source = template or ""
    return next((form for form in FORMATS if any(mark in source for mark in form.template_marks)), HERMES)
