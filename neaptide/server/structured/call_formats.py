"""Formats of function calls for grammars: what a call that is forced, or whose arguments are strict, looks like.

``parsers.formats`` says which one fits the calls that a model writes by itself.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Format of a call, which is an object with the function's name and its arguments."""

    name: str
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


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>", padding="\n", separator="\n")
"""Also the format of Qwen."""
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", "", separator=", ", is_list=True)
LLAMA = CallFormat("llama-3", "", "", arguments_key="parameters", separator="; ")
PLAIN = CallFormat("plain JSON", "", "", separator="\n")
"""For families whose own format has no grammar."""
