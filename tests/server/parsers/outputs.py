"""Outputs of models of each format: their families' documented forms, with our functions.

Every output calls ``weather`` with ``WEATHER``, unless it is listed with other calls.
"""

import re
from typing import Any, NamedTuple

WEATHER: dict[str, Any] = {"city": "Köln", "days": 2, "fine": True}
ADD: dict[str, Any] = {"a": 1, "b": [2, {"c": None}]}
TYPES = {"weather": {"city": "string", "days": "integer", "fine": "boolean"}, "add": {"a": "integer", "b": "array"}}
NAMES = frozenset(TYPES) | {"now"}

_W = '{"city": "Köln", "days": 2, "fine": true}'
_A = '{"a": 1, "b": [2, {"c": null}]}'
_PY = 'weather(city="Köln", days=2, fine=True)'
_PY_ADD = 'add(a=1, b=[2, {"c": None}])'
_ONE, _TWO = f'{{"name": "weather", "arguments": {_W}}}', f'{{"name": "add", "arguments": {_A}}}'
_STRING = '"' + _W.replace('"', '\\"') + '"'


class Output(NamedTuple):
    """One output."""

    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = (("weather", WEATHER),)
    content: str = ""
    ids: tuple[str, ...] = ()
    """Ids that the model gives, in formats that keep them."""


_BOTH = (("weather", WEATHER), ("add", ADD))
_NOW: tuple[tuple[str, dict[str, Any]], ...] = (("now", {}),)


def _xml(begin: str, end: str) -> list[Output]:
    def call(name: str, **values: str) -> str:
        lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return f"{begin}\n<function={name}>\n{lines}</function>\n{end}"

    one = call("weather", city="Köln", days="2", fine="true")
    return [
        Output(one),
        Output(one + "\n" + call("add", a="1", b='[2, {"c": null}]'), _BOTH),
        Output("Let me see.\n" + one, content="Let me see.\n"),
        Output(call("now"), _NOW),
        Output(call("add", a="1", b="[2, {'c': None}]"), (("add", ADD),)),
        Output(
            call("weather", city=f"a\nline with </parameter> and {end}", days="2"),
            (("weather", {"city": f"a\nline with </parameter> and {end}", "days": 2}),),
        ),
        Output(one.removesuffix(end)),
        Output(one.replace("\n</parameter>", "", 1)),
    ]


def _invokes(begin: str, end: str, mark: str = "", attributes: bool = False) -> list[Output]:
    def call(name: str, **values: str) -> str:
        lines = ""
        for key, value in values.items():
            kind = f' string="{"true" if key == "city" else "false"}"' if attributes else ""
            lines += f'<{mark}parameter name="{key}"{kind}>{value}</{mark}parameter>\n'
        return f'<{mark}invoke name="{name}">\n{lines}</{mark}invoke>\n'

    one, two = call("weather", city="Köln", days="2", fine="true"), call("add", a="1", b='[2, {"c": null}]')
    return [
        Output(f"{begin}\n{one}{end}"),
        Output(f"I look.\n\n{begin}\n{one}{two}{end}", _BOTH, "I look.\n\n"),
        Output(f"{begin}\n{call('now')}{end}", _NOW),
    ]


def _glm(begin: str, end: str, after_name: str = "\n", wrapper: tuple[str, str] = ("", "")) -> list[Output]:
    def call(name: str, **values: str) -> str:
        lines = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
        return f"{begin}{name}{after_name}{lines}{end}"

    one, two = call("weather", city="Köln", days="2", fine="true"), call("add", a="1", b='[2, {"c": null}]')
    first, last = wrapper
    return [
        Output(first + one + last),
        Output(f"So.{first}{one}\n{two}{last}", _BOTH, "So."),
        Output(first + call("now") + last, _NOW),
    ]


def _tagged_json(begin: str, end: str) -> list[Output]:
    return [
        Output(f"{begin}\n{_ONE}\n{end}"),
        Output(f"{begin}{_ONE}{end}\n{begin}{_TWO}{end}", _BOTH),
        Output(f"Let me see. {begin}{_ONE}{end}\nDone.", content="Let me see. \nDone."),
    ]


def _listed(begin: str, end: str) -> list[Output]:
    return [
        Output(f"{begin}[{_ONE}]{end}"),
        Output(f"{begin}[\n{_ONE},\n{_TWO}\n]{end}", _BOTH),
        Output(f'{begin}[{{"name": "now", "arguments": {{}}}}]{end}', _NOW),
    ]


_HERMES = [
    *_tagged_json("<tool_call>", "</tool_call>"),
    Output(f"<tool_call>\n{_ONE}"),
    Output(f"<tool_call>\n{_ONE}\n<tool_call>\n{_TWO}\n", _BOTH),
    Output(f'<tool_call>{{"name": "weather", "arguments": {_STRING}}}</tool_call>'),
    Output(f'<tool_call>{{"id": "x1", "type": "function", "name": "weather", "arguments": {_W}}}</tool_call>'),
    Output(f'<tool_call>{{"type": "function", "function": {_ONE}}}</tool_call>'),
    Output(f'<tool_call>{{"name": "weather", "parameters": {_W}}}</tool_call>'),
    Output(f"<tool_call>[{_ONE}, {_TWO}]</tool_call>", _BOTH),
    Output(f'<tool_call>{{"arguments": {_W}, "name": "weather"}}</tool_call>'),
    Output(f'<tool_call>{{"name": "functions.weather", "arguments": {_W}}}</tool_call>'),
    Output(f"<tool_call>\n{{{_ONE}}}\n</tool_call>"),
    Output(f"<tool_call>\n```json\n{_ONE}\n```\n</tool_call>"),
    Output('<tool_call>{"name": "now"}</tool_call>', _NOW),
    Output(
        "<tool_call>{'name': 'weather', 'arguments': {'city': 'Köln', 'days': 2, 'fine': True}}</tool_call>",
    ),
    Output(
        '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call><tool_call>"}}</tool_call>',
        (("weather", {"city": "</tool_call><tool_call>"}),),
    ),
    Output(
        '<tool_call>{"name": "weather", "arguments": {"city": "two\nlines"}}</tool_call>',
        (("weather", {"city": "two\nlines"}),),
    ),
]
_LLAMA_JSON = f'{{"name": "weather", "parameters": {_W}}}'
_LLAMA = [
    Output(_LLAMA_JSON),
    Output(f"\n{_ONE}"),
    Output(f'{{"type": "function", "name": "weather", "parameters": {_W}}}'),
    Output(f'{_LLAMA_JSON}; {{"name": "add", "parameters": {_A}}}', _BOTH),
    Output(f"{_LLAMA_JSON}\n{_TWO}", _BOTH),
    Output(f"<|python_tag|>{_LLAMA_JSON}"),
    Output(f"Sure. <|python_tag|>{_LLAMA_JSON}", content="Sure. "),
    Output('<|python_tag|>weather.call(city="Köln", days=2, fine=True)'),
    Output(f"[{_PY}, {_PY_ADD}]", _BOTH),
    Output(f"<function=weather>{_W}</function>"),
    Output(f"I look.\n{_LLAMA_JSON}", content="I look.\n"),
    Output(f'So. {{"type": "function", "name": "weather", "parameters": {_W}}}', content="So. "),
    Output(f"```json\n{_LLAMA_JSON}\n```"),
    Output(f"<|python_start|>{_LLAMA_JSON}<|python_end|>"),
]
_PYTHONIC = [
    Output(f"[{_PY}]"),
    Output(f"[{_PY}, {_PY_ADD}]", _BOTH),
    Output("[now()]", _NOW),
    Output(
        """[weather(city='O\\'Hare "\\u00fc" \\n', days=-2)]""", (("weather", {"city": 'O\'Hare "ü" \n', "days": -2}),)
    ),
    Output("[weather(city=None, days=1.5e3,)]", (("weather", {"city": None, "days": 1500.0}),)),
]
_MISTRAL = [
    *_listed("[TOOL_CALLS]", ""),
    Output(f'[TOOL_CALLS] [{{"name": "weather", "arguments": {_W}, "id": "a1b2c3d4e"}}]', ids=("a1b2c3d4e",)),
    Output(f"[TOOL_CALLS]weather{_W}"),
    Output(f"[TOOL_CALLS]weather[ARGS]{_W}[TOOL_CALLS]add[ARGS]{_A}", _BOTH),
    Output(f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{_W}", ids=("a1b2c3d4e",)),
    Output(f"Well. [TOOL_CALLS]weather[ARGS]{_W}", content="Well. "),
    Output("[TOOL_CALLS]now[ARGS]{}", _NOW),
]
_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
_DEEPSEEK = [
    Output(f"{before}<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>", calls, before)
    for form in (_V3, _V31)
    for before, inner, calls in (
        ("", form.format("weather", _W), (("weather", WEATHER),)),
        ("Hm. ", form.format("weather", _W) + "\n" + form.format("add", _A), _BOTH),
        ("", form.format("now", "{}"), _NOW),
    )
]
_DEEPSEEK.append(Output(_V3.format("weather", _W)))
_KIMI_CALL = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
_KIMI = [
    Output(_KIMI_CALL.format("weather", 3, _W), ids=("functions.weather:3",)),
    Output(f"<|tool_call_section_begin|>{_KIMI_CALL.format('now', 0, '{}')}<|tool_call_section_end|>", _NOW),
    Output(
        f"Well.<|tool_calls_section_begin|>{_KIMI_CALL.format('weather', 0, _W)}"
        f"{_KIMI_CALL.format('add', 1, _A)}<|tool_calls_section_end|>",
        _BOTH,
        "Well.",
        ("functions.weather:0", "functions.add:1"),
    ),
]
_HARMONY_CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
_HARMONY = [
    Output(_HARMONY_CALL.format("weather", _W)),
    Output(_HARMONY_CALL.format("weather", _W) + "<|call|>"),
    Output(f" to=functions.weather<|channel|>commentary json<|message|>{_W}"),
    Output("<|channel|>commentary to=functions.now <|constrain|>json<|message|><|call|>", _NOW),
]
_GEMMA = [
    Output("{begin}call:weather{{city:{q}Köln{q},days:2,fine:true}}{end}"),
    Output(
        "{begin}call:weather{{city:{q}Köln{q},days:2,fine:true}}{end}{begin}call:add{{a:1,b:[2,{{c:null}}]}}{end}",
        _BOTH,
    ),
    Output("{begin}call:now{{}}{end}", _NOW),
    Output('{begin}call:weather{{city:{q}a "b", {{c}}{q}}}{end}', (("weather", {"city": 'a "b", {c}'}),)),
]


def _gemma(begin: str, end: str, quote: str) -> list[Output]:
    return [one._replace(text=one.text.format(begin=begin, end=end, q=quote)) for one in _GEMMA]


_STEP3 = (
    "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="weather"><steptml:parameter name="city">Köln</steptml:parameter>'
    '<steptml:parameter name="days">2</steptml:parameter><steptml:parameter name="fine">true</steptml:parameter>'
    "</steptml:invoke><｜tool_call_end｜>\n{}<｜tool_calls_end｜>"
)
_STEP3_NOW = (
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now"></steptml:invoke><｜tool_call_end｜>\n'
)
_PLAMO = (
    "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{}<|plamo:end_tool_name:plamo|>"
    "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{}<|plamo:end_tool_arguments:plamo|>"
    "<|plamo:end_tool_request:plamo|>"
)
_K3_ARGUMENT = '<|open|>argument key="{}" type="{}"<|sep|>{}<|close|>argument<|sep|>'
_K3 = "".join(
    _K3_ARGUMENT.format(*one)
    for one in (("city", "string", "Köln"), ("days", "number", "2"), ("fine", "boolean", "true"))
)
_XML = _xml("<tool_call>", "</tool_call>")
_ACTION = (
    f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {_W}}},\n'
    f'    {{"tool_call_id": "1", "tool_name": "add", "parameters": {_A}}}\n]<|END_ACTION|>'
)

_M3_WEATHER = '@<invoke name="weather">\n@<city>Köln@</city>\n@<days>2@</days>\n@<fine>true@</fine>\n@</invoke>'
_M3_ADD = '@<invoke name="add">@<a>1@</a>@<b>@<item>2@</item>@<item>@<c>null@</c>@</item>@</b>@</invoke>'
_M3 = "@<tool_call>\n{}\n@</tool_call>"

OUTPUTS: dict[str, list[Output]] = {
    "apertus": [Output(f'Hm.<|tools_prefix|>[{{"weather": {_W}}}, {{"add": {_A}}}]<|tools_suffix|>', _BOTH, "Hm.")],
    "cohere_command3": [
        Output(_ACTION, _BOTH),
        Output(f'Action:```json\n[{{"tool_name": "weather", "parameters": {_W}}}]\n```'),
        Output(
            f'Plan: I look.\nAction: ```json\n[{{"tool_name": "weather", "parameters": {_W}}}]\n```',
            content="Plan: I look.",
        ),
    ],
    "cohere_command4": [Output(_ACTION, _BOTH)],
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": _invokes("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜", True),
    "deepseek_v4": _invokes("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", "｜DSML｜", True),
    "deepseek_v41": _invokes("<｜DSML｜ calls>", "</｜DSML｜ calls>", "｜DSML｜ ", True),
    "dots": [
        *_invokes("<dots_function_call>", "</dots_function_call>"),
        Output(f"<dots_function_call>\n{_ONE}\n</dots_function_call>"),
    ],
    "ernie45": _tagged_json("<tool_call>", "</tool_call>"),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "gigachat3": [
        Output(f"Hm.<|message_sep|>\n\nfunction call<|role_sep|>\n{_ONE}", content="Hm.\n\n"),
        Output(f"<|function_call|>{_ONE}"),
    ],
    "glm45": _glm("<tool_call>", "</tool_call>"),
    "glm47": _glm("<tool_call>", "</tool_call>", ""),
    "granite": [*_listed("<|tool_call|> ", ""), *_listed("<tool_call>", "")],
    "granite-20b-fc": [
        Output(f"<function_call> {_ONE}"),
        Output(f"<function_call> {_ONE}\n<function_call> {_TWO}", _BOTH),
    ],
    "granite4": _HERMES,
    "hermes": _HERMES,
    "hunyuan_a13b": _listed("<tool_calls>", "</tool_calls>"),
    "hy_v3": _glm("<tool_call>", "</tool_call>", "<tool_sep>\n", ("<tool_calls>\n", "\n</tool_calls>")),
    "hy_v4": _glm("<tool_call>", "</tool_call>", "\n", ("<tool_calls>\n", "\n</tool_calls>")),
    "inkling": [
        Output(
            f'<|content_invoke_tool_json|>{{"name": "weather", "args": {_W}}}<|end_message|>'
            f'<|content_invoke_tool_json|>{{"name": "add", "args": {_A}}}<|end_message|>',
            _BOTH,
        )
    ],
    "internlm": [Output(f"Hm.<|action_start|><|plugin|>\n{_LLAMA_JSON}<|action_end|>\n", content="Hm.")],
    "jamba": _listed("<tool_calls>", "</tool_calls>"),
    "k2_horizon": [
        *[
            one._replace(text=re.sub(r"<(/?)(tool_call|arg_key|arg_value)>", r"<\1ifm|\2>", one.text))
            for one in _glm("<tool_call>", "</tool_call>")
        ],
        Output(f"<ifm|tool_calls><ifm|tool_call>{_ONE}</ifm|tool_call></ifm|tool_calls>"),
    ],
    "kimi_k2": _KIMI,
    "kimi_k3": [
        Output(
            "<|open|>response<|sep|>Hm.<|close|>response<|sep|><|open|>tools<|sep|>"
            f'<|open|>call tool="weather" index="1"<|sep|>{_K3}<|close|>call<|sep|><|close|>tools<|sep|>',
            content="Hm.",
        )
    ],
    "lfm2": [
        Output(f"<|tool_call_start|>[{_PY}]<|tool_call_end|>It is fine.", content="It is fine."),
        Output(f"<|tool_call_start|>[{_PY}, {_PY_ADD}]<|tool_call_end|>", _BOTH),
    ],
    "ling3": _glm("<tool_call>", "</tool_call>"),
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama4_pythonic": [*_PYTHONIC, Output(f"<|python_start|>[{_PY}]<|python_end|>"), Output(_LLAMA_JSON)],
    "longcat": _tagged_json("<longcat_tool_call>", "</longcat_tool_call>"),
    "mimo": _XML,
    "minicpm5": [
        Output(
            '<function name="weather"><param name="city">Köln</param><param name="days">2</param>'
            '<param name="fine">true</param></function>\n<function name="now"></function>',
            (("weather", WEATHER), ("now", {})),
        )
    ],
    "minimax_m2": _invokes("<minimax:tool_call>", "</minimax:tool_call>"),
    "minimax_m3": [
        Output(_M3.format(_M3_WEATHER)),
        Output(
            "Hm. " + _M3.format(f"{_M3_WEATHER}\n{_M3_ADD}"),
            _BOTH,
            "Hm. ",
        ),
        Output(_M3.format('@<invoke name="now">@</invoke>'), _NOW),
        Output(_M3.format('@<invoke name="add">@<a>1@</a>@<b>@</b>@</invoke>'), (("add", {"a": 1, "b": []}),)),
    ],
    "mistral": _MISTRAL,
    "olmo3": [
        Output(f"<function_calls>\n{_PY}\n</function_calls>"),
        Output(f'<function_calls>{_PY}\nadd(a=1, b=[2, {{"c": null}}])</function_calls>', _BOTH),
    ],
    "openai": _HARMONY,
    "phi4_mini_json": [
        *_listed("functools", ""),
        *_listed("<|tool_call|>", "<|/tool_call|>"),
        Output(f"Sure.\nfunctools[{_ONE}]", content="Sure.\n"),
    ],
    "plamo3": [
        Output(
            "<|plamo:begin_tool_requests:plamo|>"
            + _PLAMO.format("weather", _W)
            + _PLAMO.format("add", _A)
            + "<|plamo:end_tool_requests:plamo|>",
            _BOTH,
        )
    ],
    "poolside_v1": _glm("<tool_call>", "</tool_call>"),
    "pythonic": _PYTHONIC,
    "qwen3_coder": [
        *_XML,
        Output("<function=now>\n</function>", _NOW),
        Output("So.\n<function=now>\n</function>\n</tool_call>", _NOW, "So.\n"),
    ],
    "qwen3_json": _HERMES,
    "qwen3_xml": _XML,
    "seed_oss": _xml("<seed:tool_call>", "</seed:tool_call>"),
    "step3": [Output(_STEP3.format("")), Output(_STEP3.format(_STEP3_NOW), (("weather", WEATHER), ("now", {})))],
    "step3p5": _XML,
    "xlam": [
        *_listed("", ""),
        *_listed("[TOOL_CALLS]", ""),
        *_listed("<tool_call>", "</tool_call>"),
        *_listed("```json\n", "\n```"),
        Output(f'{{"tool_calls": [{_ONE}, {_TWO}]}}', _BOTH),
    ],
}
"""Outputs by the name of the parser."""
OUTPUTS["minimax_m3"] = [one._replace(text=one.text.replace("@", "]<]minimax[>[")) for one in OUTPUTS["minimax_m3"]]
