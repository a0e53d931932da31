"""Formats of tool calls, one for each way in which model families write them.

Libraries exist for two of them. ``openai-harmony`` works on its own token ids, whose vocabulary it fetches from the
network, and ``cohere-melody`` on Cohere's. Both formats are marks around JSON, which the common parser reads from the
text of any tokenizer.
"""

from collections.abc import Callable

from neaptide.server.parsers.arguments import call_heads
from neaptide.server.parsers.calls import FoundCall, NoCallError, Offer, short_id
from neaptide.server.parsers.core import Parse, Section, ToolFormat
from neaptide.server.parsers.element_calls import MARK, element_calls
from neaptide.server.parsers.json_calls import headed_calls, is_open_json, json_calls, named_by_key
from neaptide.server.parsers.python_calls import Notation, dict_calls, object_calls, python_calls
from neaptide.server.parsers.tagged_calls import Tags, tagged_calls
from neaptide.server.structured import call_formats

_NAME = r"(?P<name>[\w.-]+)"
_KEYS = "name|tool_name|function|arguments|parameters|args|id|tool_call_id|call_id|type|index|tool_calls"
_OBJECT = rf'\{{\s*"(?:{_KEYS})"\s*:'
_LIST = rf"\[\s*(?:\]|{_OBJECT}|[A-Za-z_][\w.-]*\s*\()"
_FENCED = r"\s*```json\s*\["
_SIMPLE_VALUE = r'(?:"[^"\\]*"|[\w.+-]+)'
_JSON_HEAD = (
    rf'\s*(?:functools)?\s*\[?\s*\{{\s*(?:"(?:id|type|index|tool_call_id|call_id)"\s*:\s*{_SIMPLE_VALUE}\s*,\s*)*'
    rf'"(?:name|tool_name|function)"\s*:\s*"{_NAME}"\s*,\s*"(?:arguments|parameters|args)"\s*:\s*'
)
_AFTER_JSON = rf'(?:[\s}}\];,]|"\w+"\s*:\s*{_SIMPLE_VALUE})*'
_json_heads = call_heads(_JSON_HEAD, after=_AFTER_JSON)
_json = json_calls()
_python = python_calls()
_qwen_tags = tagged_calls(
    Tags(
        call=r"<function=(?P<name>[^>\s]+)\s*>",
        call_end=r"</function>",
        parameter=r"<parameter=(?P<key>[^>]+)>",
        parameter_end="</parameter>",
    )
)
_glm_tags = tagged_calls(
    Tags(
        call=r"(?P<name>[^\s<]+)",
        parameter=r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>",
        parameter_end="</arg_value>",
        is_verbatim=True,
    )
)


def _by_first(default: Parse, **others: tuple[str, Parse]) -> Parse:
    """Parser that the first text chooses. Each of the others is a beginning with its parser."""

    def parse(text: str, offer: Offer, is_cut: bool) -> list[FoundCall]:
        start = text.lstrip()
        chosen = next((one for begin, one in others.values() if start.startswith(begin)), default)
        return chosen(text, offer, is_cut)

    return parse


def _either(first: Parse, second: Parse) -> Parse:
    """Parser that reads text in one of two ways."""

    def parse(text: str, offer: Offer, is_cut: bool) -> list[FoundCall]:
        for cut in (False, True) if is_cut else (False,):
            for one in (first, second):
                try:
                    return one(text, offer, cut)
                except ValueError:
                    continue
        raise NoCallError("neither")

    return parse


def _lacks(begin: str, end: str) -> Callable[[str], bool]:
    """Whether the last ``begin`` in a section has no ``end`` yet, so that a value may spell the section's end."""
    return lambda body: body.rfind(begin) > body.rfind(end)


def _in_qwen_value(body: str) -> bool:
    if body.lstrip().startswith("<function="):
        return body.rfind("<function=") > body.rfind("</function>")
    return is_open_json(body)


_in_tool_call = _by_first(_either(_json, dict_calls), function=("<function=", _qwen_tags))

HERMES = ToolFormat(
    "hermes",
    (Section("<tool_call>", ("</tool_call>",)),),
    _in_tool_call,
    is_open=_in_qwen_value,
    grammar=call_formats.HERMES,
    needs_types=True,
    streams=_json_heads,
)
"""JSON between tags. Qwen's XML is read here too: some models write both."""
QWEN_XML = ToolFormat(
    "qwen3_coder",
    (
        Section("<tool_call>", ("</tool_call>",)),
        # Some outputs lack the first tag.
        Section("<function=", ("</function>\n</tool_call>", "</function>"), is_kept=True),
    ),
    _in_tool_call,
    is_open=_in_qwen_value,
    grammar=call_formats.HERMES,
    needs_types=True,
    streams=_json_heads,
)
SEED = ToolFormat(
    "seed_oss",
    (Section("<seed:tool_call>", ("</seed:tool_call>",)),),
    _in_tool_call,
    is_open=_in_qwen_value,
    needs_types=True,
    streams=_json_heads,
)
GLM = ToolFormat(
    "glm45",
    (Section("<tool_call>", ("</tool_call>",)),),
    _by_first(_glm_tags, json=("{", _json)),
    is_open=_lacks("<arg_value>", "</arg_value>"),
    inner_marks=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    grammar=call_formats.HERMES,
    needs_types=True,
    streams=_json_heads,
)


def hunyuan(suffix: str = "") -> ToolFormat:
    """Hunyuan V3's and V4's format. ``suffix`` ends the names of its tags, in checkpoints that have one."""
    value = Tags(
        call=rf"<tool_call{suffix}>\s*(?P<name>[^\s<]+)\s*(?:<tool_sep{suffix}>)?",
        call_end=rf"</tool_call{suffix}>",
        parameter=rf"<arg_key{suffix}>(?P<key>[^<]*)</arg_key{suffix}>\s*<arg_value{suffix}>",
        parameter_end=f"</arg_value{suffix}>",
        is_verbatim=True,
    )
    tags = ("tool_call", "arg_key", "arg_value")
    inner = [f"<{slash}{tag}{suffix}>" for tag in tags for slash in ("", "/")]
    return ToolFormat(
        "hy_v3",
        (Section(f"<tool_calls{suffix}>", (f"</tool_calls{suffix}>",)),),
        tagged_calls(value),
        is_open=_lacks(f"<tool_call{suffix}>", f"</tool_call{suffix}>"),
        inner_marks=(*inner, f"<tool_sep{suffix}>"),
        needs_types=True,
    )


HUNYUAN_V3 = hunyuan()
K2_HORIZON = ToolFormat(
    "k2_horizon",
    (Section("<ifm|tool_call>", ("</ifm|tool_call>",)),),
    _by_first(
        tagged_calls(
            Tags(
                call=r"(?P<name>[^\s<]+)",
                parameter=r"<ifm\|arg_key>(?P<key>[^<]*)</ifm\|arg_key>\s*"
                r"(?:<ifm\|arg_type>[^<]*</ifm\|arg_type>\s*)?<ifm\|arg_value>",
                parameter_end="</ifm|arg_value>",
                is_verbatim=True,
            )
        ),
        json=("{", _json),
    ),
    is_open=_lacks("<ifm|arg_value>", "</ifm|arg_value>"),
    inner_marks=("<ifm|arg_key>", "<ifm|arg_type>", "<ifm|arg_value>", "</ifm|arg_key>", "</ifm|arg_type>"),
    silent=("<ifm|tool_calls>", "</ifm|tool_calls>"),
    needs_types=True,
    streams=_json_heads,
)
_WHOLE_HEAD = rf'\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"{_NAME}"\s*,\s*"(?:arguments|parameters)"\s*:'
_LLAMA_HEAD = r"<function=(?P<name>[^>]+)>"
_llama = _by_first(
    python_calls(suffix=".call"),
    object=("{", _json),
    list=("[", _either(_json, _python)),
    fence=("```", _json),
    function=("<function=", headed_calls(_LLAMA_HEAD, r"\s*</function>(?:<\|eom_id\|>)?")),
)
LLAMA3 = ToolFormat(
    "llama3_json",
    (
        Section("<|python_tag|>"),
        Section("{", at_start=True, is_kept=True, looks=_OBJECT),
        Section("[", at_start=True, is_kept=True, looks=_LIST),
        Section("<function=", ("</function>",), at_start=True, is_kept=True),
        # As the checkpoints write them after other text.
        Section('{"name":', is_kept=True, looks=_WHOLE_HEAD),
        Section('{"type": "function",', is_kept=True, looks=_WHOLE_HEAD),
        Section("```json\n", at_start=True, is_kept=True, looks=r"```json\n\s*" + _WHOLE_HEAD),
        Section("<|python_start|>", ("<|python_end|>",)),
    ),
    _llama,
    grammar=call_formats.LLAMA,
    streams=call_heads(_JSON_HEAD, _LLAMA_HEAD, after=_AFTER_JSON),
)
PYTHONIC = ToolFormat(
    "pythonic",
    (Section("<|python_tag|>"), Section("[", at_start=True, is_kept=True, looks=_LIST)),
    _either(_python, _json),
    streams=_json_heads,
)
LLAMA4 = ToolFormat(
    "llama4_pythonic",
    (
        Section("<|python_start|>", ("<|python_end|>",)),
        Section("[", at_start=True, is_kept=True, looks=_LIST),
        Section("{", at_start=True, is_kept=True, looks=_OBJECT),
    ),
    _by_first(_python, object=("{", _json)),
    is_open=is_open_json,
    streams=_json_heads,
)
OLMO3 = ToolFormat(
    "olmo3",
    (Section("<function_calls>", ("</function_calls>",)),),
    _python,
    is_open=is_open_json,
)
LFM2 = ToolFormat(
    "lfm2",
    (Section("<|tool_call_start|>", ("<|tool_call_end|>",)),),
    _by_first(_python, object=("{", _json), list=("[{", _json)),
    is_open=is_open_json,
    streams=_json_heads,
)

_MISTRAL_HEAD = rf"\s*{_NAME}\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\])?\s*"
_mistral = _by_first(
    headed_calls(_MISTRAL_HEAD + r"(?={)"),
    list=("[", json_calls(keeps_ids=True)),
    object=("{", json_calls(keeps_ids=True)),
)
MISTRAL = ToolFormat(
    "mistral",
    (Section("[TOOL_CALLS]"),),
    _mistral,
    is_open=is_open_json,
    inner_marks=("[ARGS]", "[CALL_ID]"),
    grammar=call_formats.MISTRAL,
    new_id=short_id,
    streams=call_heads(_MISTRAL_HEAD),
)
_DEEPSEEK_HEAD = (
    r"\s*<｜tool▁call▁begin｜>\s*(?:function\s*<｜tool▁sep｜>)?\s*"
    r"(?P<name>[\w.-]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?\s*)?"
)
_DEEPSEEK_TAIL = r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?\s*"
DEEPSEEK = ToolFormat(
    "deepseek_v3",
    (
        Section("<｜tool▁calls▁begin｜>", ("<｜tool▁calls▁end｜>",)),
        Section("<｜tool▁call▁begin｜>", ("<｜tool▁call▁end｜>",), is_kept=True),
    ),
    headed_calls(_DEEPSEEK_HEAD, _DEEPSEEK_TAIL),
    is_open=is_open_json,
    inner_marks=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    streams=call_heads(_DEEPSEEK_HEAD, after=_DEEPSEEK_TAIL),
)
"""V3 and R1 put ``function`` before the name and a fence around the arguments, V3.1 does not."""


def _dsml(name: str, wrapper: str, space: str = "") -> ToolFormat:
    mark = f"｜DSML｜{space}"
    return ToolFormat(
        name,
        (Section(f"<{mark}{wrapper}>", (f"</{mark}{wrapper}>",)),),
        tagged_calls(
            Tags(
                call=rf'<{mark}invoke name="(?P<name>[^"]+)"\s*>',
                call_end=rf"</{mark}invoke>",
                parameter=rf'<{mark}parameter name="(?P<key>[^"]+)"(?:\s+string="(?:(?P<text>true)|false)")?\s*>',
                parameter_end=f"</{mark}parameter>",
                is_verbatim=True,
                says_types=True,
            )
        ),
        is_open=_lacks(f"<{mark}invoke", f"</{mark}invoke>"),
        inner_marks=("｜DSML｜",),
    )


DEEPSEEK_V32 = _dsml("deepseek_v32", "function_calls")
DEEPSEEK_V4 = _dsml("deepseek_v4", "tool_calls")
DEEPSEEK_V41 = _dsml("deepseek_v41", "calls", " ")
_KIMI_HEAD = (
    r"\s*<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)\s*"
    r"<\|tool_call_argument_begin\|>\s*"
)
_KIMI_TAIL = r"\s*(?:<\|tool_call_end\|>)?\s*"
KIMI = ToolFormat(
    "kimi_k2",
    (
        Section("<|tool_calls_section_begin|>", ("<|tool_calls_section_end|>",)),
        Section("<|tool_call_section_begin|>", ("<|tool_call_section_end|>",)),
        Section("<|tool_call_begin|>", ("<|tool_call_end|>",), is_kept=True),
    ),
    headed_calls(_KIMI_HEAD, _KIMI_TAIL),
    is_open=is_open_json,
    inner_marks=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    streams=call_heads(_KIMI_HEAD, after=_KIMI_TAIL),
)
"""The ids are the model's own: its template wants them back."""
KIMI_K3 = ToolFormat(
    "kimi_k3",
    (Section("<|open|>tools<|sep|>", ("<|close|>tools<|sep|>",)),),
    tagged_calls(
        Tags(
            call=r'<\|open\|>call tool="(?P<name>[^"]+)"[^<]*<\|sep\|>',
            call_end=r"<\|close\|>call<\|sep\|>",
            parameter=r'<\|open\|>argument key="(?P<key>[^"]+)" type="(?:(?P<text>string)|\w+)"<\|sep\|>',
            parameter_end="<|close|>argument<|sep|>",
            is_verbatim=True,
            says_types=True,
        )
    ),
    is_open=_lacks("<|open|>call", "<|close|>call"),
    silent=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
)
_HARMONY_HEAD = r"(?P<name>[\w.-]+)[^{]*?(?:<\|message\|>)\s*"
GPT_OSS = ToolFormat(
    "openai",
    (
        Section("<|channel|>commentary to=functions.", ("<|call|>", "<|end|>")),
        Section("<|channel|>analysis to=functions.", ("<|call|>", "<|end|>")),
        Section("to=functions.", ("<|call|>", "<|end|>"), at_start=True),
    ),
    headed_calls(_HARMONY_HEAD),
    is_open=is_open_json,
    inner_marks=("<|constrain|>", "<|message|>"),
    streams=call_heads(_HARMONY_HEAD),
)
COHERE = ToolFormat(
    "cohere_command3",
    (
        Section("<|START_ACTION|>", ("<|END_ACTION|>",)),
        Section("Action:", at_start=True),
        Section("\nAction:", looks=_FENCED),
    ),
    _json,
    is_open=is_open_json,
    silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    streams=_json_heads,
)
GRANITE = ToolFormat(
    "granite",
    (Section("<|tool_call|>"), Section("<tool_call>", ("</tool_call>",))),
    _json,
    is_open=is_open_json,
    streams=_json_heads,
)
GRANITE_20B = ToolFormat(
    "granite-20b-fc", (Section("<function_call>"),), _json, is_open=is_open_json, streams=_json_heads
)
PHI4_MINI = ToolFormat(
    "phi4_mini_json",
    (
        Section("functools[", is_kept=True),
        Section("<|tool_call|>", ("<|/tool_call|>",)),
        Section("[", at_start=True, is_kept=True, looks=_LIST),
    ),
    lambda text, offer, is_cut: _json(text.lstrip().removeprefix("functools"), offer, is_cut),
    is_open=is_open_json,
    streams=_json_heads,
)
JAMBA = ToolFormat(
    "jamba",
    (Section("<tool_calls>", ("</tool_calls>",)),),
    _json,
    is_open=is_open_json,
    silent=("<answer>", "\n</answer>", "</answer>"),
    streams=_json_heads,
)
"""Hunyuan's format too."""
XLAM = ToolFormat(
    "xlam",
    (
        Section("[TOOL_CALLS]"),
        Section("<tool_call>", ("</tool_call>",)),
        Section("```json\n", at_start=True, is_kept=True),
        Section("[", at_start=True, is_kept=True, looks=_LIST),
        Section("{", at_start=True, is_kept=True, looks=_OBJECT),
    ),
    _json,
    is_open=is_open_json,
    streams=_json_heads,
)
MINIMAX_M2 = ToolFormat(
    "minimax_m2",
    (Section("<minimax:tool_call>", ("</minimax:tool_call>",)),),
    tagged_calls(
        Tags(
            call=r"<invoke name=[\"']?(?P<name>[^\"'>]+)[\"']?\s*>",
            call_end=r"</invoke>",
            parameter=r"<parameter name=[\"']?(?P<key>[^\"'>]+)[\"']?\s*>",
            parameter_end="</parameter>",
        )
    ),
    is_open=_lacks("<invoke", "</invoke>"),
    needs_types=True,
)
MINIMAX_M3 = ToolFormat(
    "minimax_m3",
    (Section(f"{MARK}<tool_call>", (f"{MARK}</tool_call>",)),),
    element_calls,
    needs_types=True,
)
DOTS = ToolFormat(
    "dots",
    (Section("<dots_function_call>", ("</dots_function_call>",)),),
    _by_first(MINIMAX_M2.parse, object=("{", _json)),
    is_open=_lacks("<invoke", "</invoke>"),
    needs_types=True,
    streams=_json_heads,
)
MINICPM5 = ToolFormat(
    "minicpm5",
    (Section("<function name=", ("</function>",), is_kept=False),),
    tagged_calls(
        Tags(
            call=r"[\"'](?P<name>[^\"']+)[\"'][^>]*>",
            parameter=r"<param name=[\"'](?P<key>[^\"']+)[\"']>",
            parameter_end="</param>",
        )
    ),
    is_open=_lacks("<param ", "</param>"),
    needs_types=True,
)
STEP3 = ToolFormat(
    "step3",
    (Section("<｜tool_calls_begin｜>", ("<｜tool_calls_end｜>",)),),
    tagged_calls(
        Tags(
            call=r'<steptml:invoke name="(?P<name>[^"]+)">',
            call_end=r"</steptml:invoke>",
            parameter=r'<steptml:parameter name="(?P<key>[^"]+)">',
            parameter_end="</steptml:parameter>",
            between=r"<｜tool_call_begin｜>|<｜tool_call_end｜>|function|<｜tool_sep｜>",
        )
    ),
    is_open=_lacks("<steptml:invoke", "</steptml:invoke>"),
    inner_marks=("<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"),
    needs_types=True,
)
INTERNLM = ToolFormat(
    "internlm",
    (Section("<|action_start|><|plugin|>", ("<|action_end|>",)),),
    _json,
    is_open=is_open_json,
    streams=_json_heads,
)
LONGCAT = ToolFormat(
    "longcat",
    (Section("<longcat_tool_call>", ("</longcat_tool_call>",)),),
    _json,
    is_open=is_open_json,
    streams=_json_heads,
)
GIGACHAT3 = ToolFormat(
    "gigachat3",
    (Section("function call<|role_sep|>\n"), Section("<|function_call|>")),
    _json,
    silent=("<|message_sep|>",),
    streams=_json_heads,
)
FUNCTION_GEMMA = ToolFormat(
    "functiongemma",
    (Section("<start_function_call>", ("<end_function_call>",)),),
    object_calls(Notation(("<escape>",), has_escapes=False, bare_ends=",}]")),
    is_open=lambda body: body.count("<escape>") % 2 == 1,
    inner_marks=("<escape>",),
)
GEMMA4 = ToolFormat(
    "gemma4",
    (Section("<|tool_call>", ("<tool_call|>",)),),
    object_calls(Notation(('<|"|>',), has_escapes=False, bare_ends=",}]")),
    is_open=lambda body: body.count('<|"|>') % 2 == 1,
    inner_marks=('<|"|>',),
)
APERTUS = ToolFormat(
    "apertus",
    (Section("<|tools_prefix|>", ("<|tools_suffix|>",)),),
    json_calls(read=named_by_key),
    is_open=is_open_json,
    streams=call_heads(rf'\s*\[?\s*\{{\s*"{_NAME}"\s*:\s*', after=_AFTER_JSON),
)
_PLAMO_HEAD = (
    r"\s*<\|plamo:begin_tool_request:plamo\|>\s*<\|plamo:begin_tool_name:plamo\|>(?P<name>[^<]+)"
    r"<\|plamo:end_tool_name:plamo\|>\s*<\|plamo:begin_tool_arguments:plamo\|>"
    r"(?:<\|plamo:constrain\|>json<\|plamo:msg\|>)?\s*"
)
_PLAMO_TAIL = r"\s*<\|plamo:end_tool_arguments:plamo\|>\s*<\|plamo:end_tool_request:plamo\|>\s*"
PLAMO3 = ToolFormat(
    "plamo3",
    (Section("<|plamo:begin_tool_requests:plamo|>", ("<|plamo:end_tool_requests:plamo|>",)),),
    headed_calls(_PLAMO_HEAD, _PLAMO_TAIL),
    is_open=is_open_json,
    inner_marks=("<|plamo:constrain|>", "<|plamo:msg|>"),
    streams=call_heads(_PLAMO_HEAD, after=_PLAMO_TAIL),
)
INKLING = ToolFormat(
    "inkling",
    (Section("<|content_invoke_tool_json|>", ("<|end_message|>", "<|content_model_end_sampling|>")),),
    _json,
    is_open=is_open_json,
    streams=_json_heads,
)
PLAIN = ToolFormat(
    "plain JSON",
    (Section("{", at_start=True, is_kept=True, looks=_OBJECT),),
    _json,
    streams=_json_heads,
    grammar=call_formats.PLAIN,
)
"""How forced calls are written where a family's own format has no grammar."""


def no_calls(text: str, offer: Offer, is_cut: bool) -> list[FoundCall]:
    """The parser of a format that is not yet known: nothing is a call."""
    raise NoCallError("not yet parsed")
