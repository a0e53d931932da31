"""Which parsers a model gets: by name, by its template and tokens, or of the user's own."""

import re
from pathlib import Path

import pytest

from neaptide.engine.extensions import ExtensionError
from neaptide.launch.serve import LaunchError, embedded_model_path, model_context
from neaptide.server.parsers.choose import AUTO, NONE, check_names, choose_parsers
from neaptide.server.parsers.core import ReasoningFormat, Section, ToolFormat
from neaptide.server.parsers.json_calls import json_calls
from neaptide.server.parsers.names import REASONING_PARSERS, TOOL_PARSERS
from neaptide.server.settings import Settings

QWEN3 = "{%- if tools %}<tools></tools><tool_call>{%- endif %}{{ '<think>\\n\\n</think>' }}"


def chosen(template: str | None = None, *tokens: str) -> tuple[str, str]:
    found = choose_parsers(AUTO, AUTO, template, tokens)
    return found.tool_name, found.reasoning_name


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        (None, (), ("hermes", "none")),
        ("{{ messages }}", (), ("hermes", "none")),
        (QWEN3, (), ("hermes", "qwen3")),
        ("{{ messages }}", ("<think>", "</think>", "<tool_call>"), ("hermes", "qwen3")),
        ("<tool_call>\n<function=example><parameter=a>", (), ("qwen3_coder", "none")),
        ("<tool_call>{name}\n<arg_key></think>", (), ("glm45", "qwen3")),
        ("... [TOOL_CALLS] ...", (), ("mistral", "none")),
        ("{{ messages }}", ("[TOOL_CALLS]", "[THINK]"), ("mistral", "mistral")),
        ('Respond in the format {"name": function name, "parameters": dictionary of ...}', (), ("llama3_json", "none")),
        ("<|python_tag|>", ("<|python_start|>",), ("llama4_pythonic", "none")),
        ("<｜tool▁calls▁begin｜> {% set content = content.split('</think>')[-1] %}", (), ("deepseek_v3", "qwen3")),
        ("<｜DSML｜function_calls>", (), ("deepseek_v32", "none")),
        ("<seed:tool_call><function=f>", ("<seed:think>",), ("seed_oss", "seed_oss")),
        ("<minimax:tool_call> <think>", (), ("minimax_m2", "qwen3")),
        ("analysis commentary to=functions", ("<|channel|>", "<|constrain|>"), ("openai", "openai_gptoss")),
        ("", ("<|tool_calls_section_begin|>",), ("kimi_k2", "none")),
        ("<|START_ACTION|>", ("<|START_THINKING|>",), ("cohere_command3", "cohere_command3")),
        ("Here is my thought process: <|tool_call|>", (), ("granite", "granite")),
        ("<think></think> and <response></response> <|tool_call|>", (), ("granite", "granite_thinking_parser")),
        ("<think>{{ thoughts }}</think><response>\n", (), ("hermes", "ernie45")),
        ("Write 'Action:' followed by a list of actions", (), ("cohere_command3", "none")),
        ("<|tool|>{{ tools }}<|/tool|>", (), ("phi4_mini_json", "none")),
        ("<function_calls>", (), ("olmo3", "none")),
        ("<start_function_call>", (), ("functiongemma", "none")),
        ("<think><answer><tool_calls>", (), ("jamba", "hunyuan_a13b")),
    ],
)
def test_template_and_tokens_tell_the_format(
    template: str | None, tokens: tuple[str, ...], expected: tuple[str, str]
) -> None:
    assert chosen(template, *tokens) == expected


def test_a_name_wins() -> None:
    found = choose_parsers("mistral", "deepseek_r1", QWEN3, ())
    assert (found.tools, found.reasoning) == (TOOL_PARSERS["mistral"], REASONING_PARSERS["deepseek_r1"])
    assert choose_parsers(NONE, NONE, QWEN3, ())[:2] == (None, None)


def test_hunyuans_tags_may_have_a_suffix() -> None:
    tokens = ("<tool_calls:6124>", "<tool_call:6124>", "<think:6124>")
    found = choose_parsers(AUTO, AUTO, "{{ tools }}", tokens)
    assert found.tools is not None
    assert found.reasoning is not None
    assert (found.tools.sections[0].begin, found.reasoning.begins) == ("<tool_calls:6124>", ("<think:6124>",))


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(ExtensionError, match=r"no tool call parser 'hermse'; there are: .*hermes, .*module:Name"):
        check_names("hermse", AUTO)
    with pytest.raises(ExtensionError, match=r"no reasoning parser 'qwen'; there are: .*qwen3, "):
        check_names(AUTO, "qwen")
    with pytest.raises(LaunchError, match="no reasoning parser 'qwen'"):
        model_context(Settings(reasoning_parser="qwen"), Path("unused"))


def test_a_format_that_is_not_yet_parsed_is_one_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    missing = sorted(name for name, form in TOOL_PARSERS.items() if form is None)
    assert missing
    for name in missing:
        assert choose_parsers(name, AUTO, None, ()).warning == (
            f"the tool call format {name} is not yet parsed: calls of auto stay text"
        )
    assert "muse_glimmer" in choose_parsers(AUTO, AUTO, "<atem:function_calls>", ()).warning
    assert "no known format" in choose_parsers(AUTO, AUTO, "{{ tools }} CALL:", ()).warning
    assert not choose_parsers(AUTO, AUTO, QWEN3, ()).warning
    model_context(Settings(tool_call_parser=missing[0], enable_auto_tool_choice=True), tmp_path)
    assert [record.message for record in caplog.records if "not yet parsed" in record.message] == [
        f"the tool call format {missing[0]} is not yet parsed: calls of auto stay text"
    ]


def test_the_embedded_model_has_hermes_calls_and_no_reasoning(tmp_path: Path) -> None:
    context, _ = model_context(Settings(), tmp_path)
    assert (context.parsers.tool_name, context.parsers.reasoning_name) == ("hermes", "none")
    assert embedded_model_path().is_dir()


class OwnFormat:
    """A user's format: a callable without arguments that returns the format."""

    def __new__(cls) -> ToolFormat:  # type: ignore[misc]
        return ToolFormat("own", (Section("CALL ", ("\n",)),), json_calls())


OWN_REASONING = ReasoningFormat("own", ("(thinks)",), ("(speaks)",))


def test_code_of_ones_own_is_named_by_module_and_class() -> None:
    found = choose_parsers(f"{__name__}:OwnFormat", f"{__name__}:OWN_REASONING", None, ())
    assert found.tools is not None
    assert found.tools.name == "own"
    assert found.reasoning is OWN_REASONING
    with pytest.raises(ExtensionError, match="is no ToolFormat"):
        check_names(f"{__name__}:chosen", AUTO)
    with pytest.raises(ExtensionError, match="cannot be loaded"):
        check_names("no_such_module:Format", AUTO)


def test_the_page_names_every_parser_and_says_which_are_not_yet() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tools-and-reasoning.md").read_text()
    missing = page.partition("**Not yet parsed.** Tool calls: ")[2].partition("Such a model")[0]
    missing_tools, _, missing_reasoning = missing.partition("Reasoning: ")
    for parsers, listed in ((TOOL_PARSERS, missing_tools), (REASONING_PARSERS, missing_reasoning)):
        assert set(re.findall(r"`([\w-]+)`", listed)) == {name for name, form in parsers.items() if form is None}
        assert set(parsers) <= set(re.findall(r"`([\w-]+)`", page))
