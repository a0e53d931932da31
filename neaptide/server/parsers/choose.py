"""Chooses a model's parsers: by name, as code of the user's own, or from the template and the names of tokens."""

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeVar

from neaptide.engine import extensions
from neaptide.engine.extensions import ExtensionError
from neaptide.server.parsers import formats, reasoning_formats
from neaptide.server.parsers.core import ReasoningFormat, ToolFormat
from neaptide.server.parsers.names import REASONING_PARSERS, TOOL_PARSERS

AUTO, NONE = "auto", "none"
TOOL_KIND, REASONING_KIND = "tool call parser", "reasoning parser"
TOOL_GROUP, REASONING_GROUP = "neaptide.tool_parsers", "neaptide.reasoning_parsers"
_F = TypeVar("_F")


class OutputParsers(NamedTuple):
    """How a model writes what is not content."""

    tools: ToolFormat | None = formats.HERMES
    """None if calls stay text."""
    reasoning: ReasoningFormat | None = None
    tool_name: str = "hermes"
    """Names in vLLM's list, for reports."""
    reasoning_name: str = NONE
    warning: str = ""
    """Warning for the operator; empty if all is well."""


class _Sign(NamedTuple):
    """Texts that tell a format. One of them in the template, or the name of an added token, is enough."""

    name: str
    signs: tuple[str, ...]
    also: str = ""
    """Text that the template must contain too."""


_TOOL_SIGNS = (
    _Sign("openai", ("<|channel|>",), "to=functions"),
    _Sign("openai", ("<|constrain|>",)),
    _Sign("kimi_k2", ("<|tool_calls_section_begin|>",)),
    _Sign("kimi_k3", ("<|open|>tools<|sep|>",)),
    _Sign("deepseek_v32", ("｜DSML｜function_calls",)),
    _Sign("deepseek_v4", ("｜DSML｜tool_calls",)),
    _Sign("deepseek_v41", ("｜DSML｜ calls",)),
    _Sign("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    _Sign("step3", ("<steptml:", "<｜tool_calls_begin｜>")),
    _Sign("seed_oss", ("<seed:tool_call>",)),
    _Sign("minimax_m3", ("]<]minimax[>[",)),
    _Sign("minimax_m2", ("<minimax:tool_call>",)),
    _Sign("k2_horizon", ("<ifm|tool_calls>",)),
    _Sign("muse_glimmer", ("<atem:function_calls>",)),
    _Sign("plamo3", ("<|plamo:begin_tool_requests:plamo|>",)),
    _Sign("inkling", ("<|content_invoke_tool_json|>",)),
    _Sign("hy_v3", ("<tool_sep>",)),
    _Sign("glm45", ("<arg_key>",)),
    _Sign("qwen3_coder", ("<function=", "<parameter="), "<tool_call>"),
    _Sign("dots", ("<dots_function_call>",)),
    _Sign("minicpm5", ("<function name=",)),
    _Sign("longcat", ("<longcat_tool_call>",)),
    _Sign("cohere_command3", ("<|START_ACTION|>", "Write 'Action:' followed")),
    _Sign("functiongemma", ("<start_function_call>",)),
    _Sign("gemma4", ("<|tool_call>",)),
    _Sign("apertus", ("<|tools_prefix|>",)),
    _Sign("lfm2", ("<|tool_call_start|>",)),
    _Sign("internlm", ("<|plugin|>",)),
    _Sign("gigachat3", ("function call<|role_sep|>", "<|function_call|>")),
    _Sign("llama4_pythonic", ("<|python_start|>",)),
    _Sign("olmo3", ("<function_calls>",)),
    _Sign("phi4_mini_json", ("functools[", "<|/tool_call|>", "<|/tool|>")),
    _Sign("granite-20b-fc", ("<function_call>",)),
    _Sign("granite", ("<|tool_call|>",)),
    _Sign("jamba", ("<tool_calls>",)),
    _Sign("mistral", ("[TOOL_CALLS]",)),
    _Sign("hermes", ("<tool_call>",)),
    _Sign("llama3_json", ("<|python_tag|>", '"parameters": dictionary')),
)
"""In this order: a format's own mark before one that several families share."""
_REASONING_SIGNS = (
    _Sign("openai_gptoss", ("<|channel|>",), "analysis"),
    _Sign("openai_gptoss", ("<|constrain|>",)),
    _Sign("kimi_k3", ("<|open|>think<|sep|>",)),
    _Sign("k2_horizon", ("<ifm|think>",)),
    _Sign("minimax_m3", ("<mm:think>",)),
    _Sign("seed_oss", ("<seed:think>",)),
    _Sign("gemma4", ("<|channel>",)),
    _Sign("cohere_command3", ("<|START_THINKING|>",)),
    _Sign("plamo3", ("<|plamo:begin_think:plamo|>",)),
    _Sign("inkling", ("<|content_thinking|>",)),
    _Sign("muse_glimmer", ("to=self<|message|>",)),
    _Sign("mistral", ("[THINK]",)),
    _Sign("granite", ("Here is my thought process:",)),
    _Sign("hunyuan_a13b", ("<answer>",), "<think>"),
    _Sign("granite_thinking_parser", ("<response></response>",), "<think></think>"),
    _Sign("ernie45", ("<response>",), "<think>"),
    _Sign("qwen3", ("<think>", "</think>")),
)


_SUFFIXED = ("hy_v3", "hy_v4")
_SUFFIX = re.compile(r"<tool_calls(:\w+)>")


def choose_parsers(tool_name: str, reasoning_name: str, template: str | None, tokens: Collection[str]) -> OutputParsers:
    """The parsers of a model.

    Args:
        tool_name: a name, ``module:Class``, ``none``, or ``auto``; ``reasoning_name`` likewise.
        template: source of the chat template.
        tokens: texts of the added tokens.

    Raises:
        ExtensionError: there is no such parser, or it cannot be loaded.
    """
    warnings = []
    tools: ToolFormat | None
    found = _recognized(_TOOL_SIGNS, template, tokens) if tool_name == AUTO else tool_name
    if found is None:
        # Without any sign it is Hermes' format, which many fine-tunes have learned.
        tools, found = formats.HERMES, "hermes"
        if template is not None and "tools" in template:
            warnings.append("the chat template shows no known format of tool calls: calls of auto may stay text")
    else:
        tools = _format(found, TOOL_PARSERS, TOOL_GROUP, TOOL_KIND, ToolFormat)
        if tools is None and found != NONE:
            warnings.append(f"the tool call format {found} is not yet parsed: calls of auto stay text")
    reasoning_found = (
        _recognized(_REASONING_SIGNS, template, tokens) or NONE if reasoning_name == AUTO else reasoning_name
    )
    reasoning = _format(reasoning_found, REASONING_PARSERS, REASONING_GROUP, REASONING_KIND, ReasoningFormat)
    if suffix := _suffix(tokens):
        tools = formats.hunyuan(suffix) if found in _SUFFIXED else tools
        reasoning = reasoning_formats.hunyuan(suffix) if reasoning_found in _SUFFIXED else reasoning
    if reasoning is None and reasoning_found != NONE:
        warnings.append(f"the reasoning format {reasoning_found} is not yet parsed: reasoning stays in the text")
    return OutputParsers(tools, reasoning, found, reasoning_found, "; ".join(warnings))


def _suffix(tokens: Collection[str]) -> str:
    """End of the names of Hunyuan's tags in this checkpoint, with its colon."""
    found = (_SUFFIX.fullmatch(token) for token in tokens)
    return next((match[1] for match in found if match is not None), "")


def check_names(tool_name: str, reasoning_name: str) -> None:
    """Checks both names without a model. Raises ExtensionError."""
    for name, built_in, group, kind, shape in (
        (tool_name, TOOL_PARSERS, TOOL_GROUP, TOOL_KIND, ToolFormat),
        (reasoning_name, REASONING_PARSERS, REASONING_GROUP, REASONING_KIND, ReasoningFormat),
    ):
        if name != AUTO:
            _format(name, built_in, group, kind, shape)


def _recognized(signs: tuple[_Sign, ...], template: str | None, tokens: Collection[str]) -> str | None:
    source = template or ""
    if _suffix(tokens):
        return _SUFFIXED[0]
    for name, marks, also in signs:
        if any(mark in source or mark in tokens for mark in marks) and also in source:
            return name
    return None


def _format(name: str, built_in: Mapping[str, _F | None], group: str, kind: str, shape: type[_F]) -> _F | None:
    """The format with this name; None if it is not yet parsed, or none is wanted."""
    if name == NONE:
        return None
    if name in built_in:
        return built_in[name]
    found: Any = extensions.load(group, kind, name)
    if found is None:
        raise extensions.refusal(group, (AUTO, NONE, *built_in), kind, name)
    try:
        made = found() if callable(found) else found
    except Exception as error:
        raise ExtensionError(f"the {kind} {name!r} cannot be made: {extensions.reason(error)}") from error
    if not isinstance(made, shape):
        raise ExtensionError(f"the {kind} {name!r} is no {shape.__name__} of neaptide.server.parsers.core")
    return made
