"""Outputs of each family come back as calls, reasoning and content, in one piece and in any pieces."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.server.parsers.calls import CallPiece, Offer, ParsedToolCall
from neaptide.server.parsers.core import OutputParser, ReasoningFormat, ToolFormat
from neaptide.server.parsers.names import REASONING_PARSERS, TOOL_PARSERS
from tests.server.parsers.outputs import NAMES, OUTPUTS, TYPES, Output

OFFER = Offer(NAMES, TYPES)
PARSED = {name: form for name, form in TOOL_PARSERS.items() if form is not None}
REASONING = {name: form for name, form in REASONING_PARSERS.items() if form is not None}
CASES = [pytest.param(name, one, id=f"{name}-{index}") for name in OUTPUTS for index, one in enumerate(OUTPUTS[name])]


class Read(NamedTuple):
    """An output, as a client puts it together."""

    content: str
    reasoning: str
    calls: list[ParsedToolCall]


def read(
    pieces: Sequence[str],
    tools: ToolFormat | None,
    reasoning: ReasoningFormat | None = None,
    *,
    is_cut: bool = False,
    is_reasoning: bool = False,
) -> Read:
    """Everything that the pieces add up to."""
    parser = OutputParser(reasoning, tools, OFFER, is_reasoning=is_reasoning)
    parts = [*map(parser.push, pieces), parser.finish(is_cut=is_cut)]
    calls = joined([piece for part in parts for piece in part.calls])
    assert calls == parser.calls
    return Read("".join(part.content for part in parts), "".join(part.reasoning for part in parts), calls)


def joined(pieces: Sequence[CallPiece]) -> list[ParsedToolCall]:
    """The calls, as a client puts them together. Each begins once and ends once, after the one before it."""
    calls: list[ParsedToolCall] = []
    is_open = False
    for piece in pieces:
        assert piece.is_first is not is_open
        if piece.is_first:
            calls.append(ParsedToolCall(piece.id, piece.name, ""))
        call = calls[piece.index]
        assert piece.index == len(calls) - 1
        assert (piece.id, piece.name) == (call.id, call.name)
        calls[-1] = replace(call, arguments=call.arguments + piece.arguments)
        is_open = not piece.is_last
    assert not is_open
    return calls


def values(found: Read) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in found.calls]


def plain(found: Read) -> tuple[str, str, list[tuple[str, str]]]:
    """Without ids, which are new each time."""
    return found.content, found.reasoning, [(call.name, call.arguments) for call in found.calls]


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def test_every_parsed_name_has_outputs() -> None:
    assert set(OUTPUTS) == set(PARSED)


@pytest.mark.parametrize(("name", "output"), CASES)
def test_what_a_family_writes_is_calls(name: str, output: Output) -> None:
    for pieces in ([output.text], list(output.text)):
        found = read(pieces, PARSED[name])
        assert (found.content, values(found)) == (output.content, list(output.calls))
        if output.ids:
            assert [call.id for call in found.calls] == list(output.ids)
        assert len({call.id for call in found.calls}) == len(found.calls)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_pieces_give_the_same(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(OUTPUTS)))
    reasoning = data.draw(st.sampled_from([None, *REASONING.values()]))
    marks = [*PARSED[name].marks, *(reasoning.marks if reasoning else ())]
    noise = st.sampled_from(["", " ", "\n", "x", "{", "[", '"', *marks, *(mark[:-1] for mark in marks)])
    parts = st.lists(st.one_of(noise, st.sampled_from([one.text for one in OUTPUTS[name]])), max_size=6)
    text = "".join(data.draw(parts))
    is_cut, is_reasoning = data.draw(st.booleans()), reasoning is not None and data.draw(st.booleans())
    pieces = cut(text, data.draw(st.lists(st.integers(0, 1000), max_size=8)))
    whole = read([text], PARSED[name], reasoning, is_cut=is_cut, is_reasoning=is_reasoning)
    assert plain(read(pieces, PARSED[name], reasoning, is_cut=is_cut, is_reasoning=is_reasoning)) == plain(whole)


WHOLE_ONLY = {"functiongemma", "gemma4", "kimi_k3", "minimax_m2", "minimax_m3", "olmo3", "step3", "minicpm5"}
WHOLE_ONLY |= {"deepseek_v32", "deepseek_v4", "deepseek_v41", "hy_v3", "hy_v4"}
"""Formats whose arguments are no JSON: a call comes at its end."""


def test_formats_with_json_arguments_pass_them_on_as_they_come() -> None:
    assert {name for name, form in PARSED.items() if form.streams is None} == WHOLE_ONLY
    num_streamed = 0
    for name, outputs in OUTPUTS.items():
        for output in outputs:
            parser = OutputParser(None, PARSED[name], OFFER)
            pieces = [piece for character in output.text for piece in parser.push(character).calls]
            arguments = [piece.arguments for piece in pieces if piece.index == 0]
            num_streamed += len(arguments) > 20
    assert num_streamed > 60


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "deepseek_v31", "kimi_k2", "openai", "granite"])
def test_arguments_come_while_the_model_writes_them(name: str) -> None:
    # The older lists of Mistral have an id after the arguments, so they are read as a whole.
    output = next(one for one in OUTPUTS[name] if name != "mistral" or "[ARGS]" in one.text)
    parser = OutputParser(None, PARSED[name], OFFER)
    end = output.text.index("Köln") + len("Köln")
    (piece,) = parser.push(output.text[:end]).calls
    assert (piece.name, piece.arguments) == ("weather", '{"city": "Köln')
    assert (piece.is_first, piece.is_last) == (True, False)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_broken_arguments_in_any_pieces_give_the_same(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(set(OUTPUTS) - WHOLE_ONLY)))
    text = data.draw(st.sampled_from([one.text for one in OUTPUTS[name]]))
    noise = st.sampled_from(
        ["", "{", "}", "]", "'", '"', "\\", "\n", ",", ", }", "Tru", "True", "x" * 600, *PARSED[name].marks]
    )
    for _ in range(data.draw(st.integers(1, 3))):
        place, dropped = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 3))
        text = text[:place] + data.draw(noise) + text[place + dropped :]
    is_cut = data.draw(st.booleans())
    pieces = cut(text, data.draw(st.lists(st.integers(0, 2000), max_size=8)))
    whole = plain(read([text], PARSED[name], is_cut=is_cut))
    assert plain(read(pieces, PARSED[name], is_cut=is_cut)) == whole
    assert plain(read(list(text), PARSED[name], is_cut=is_cut)) == whole


@pytest.mark.parametrize("name", PARSED)
@pytest.mark.parametrize("reasoning", [REASONING["qwen3"], REASONING["deepseek_r1"], REASONING["openai_gptoss"]])
def test_no_call_comes_out_of_reasoning(name: str, reasoning: ReasoningFormat) -> None:
    for output in OUTPUTS[name]:
        thought = f"Perhaps {output.text} - no."
        if any(end in thought for end in reasoning.ends):
            continue
        text = f"{reasoning.begins[0]}{thought}{reasoning.ends[0]}\n\nIt is fine."
        found = read([text], PARSED[name], reasoning)
        assert (found.reasoning, found.calls) == (thought, [])
        assert found.content == "It is fine."


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_nothing_inside_reasoning_is_a_call(data: st.DataObject) -> None:
    """Whatever is thought, and however the output ends."""
    name = data.draw(st.sampled_from(sorted(OUTPUTS)))
    reasoning = data.draw(st.sampled_from(sorted(REASONING.values(), key=lambda form: form.name)))
    pieces = [one.text for one in OUTPUTS[name]] + list(PARSED[name].marks) + ["thus ", "\n"]
    thought = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=5)))
    for end in reasoning.ends:
        thought = thought.replace(end, "")
    if any(end in thought for end in reasoning.ends):
        return
    text = reasoning.begins[0] + thought
    found = read(cut(text, data.draw(st.lists(st.integers(0, 1000), max_size=4))), PARSED[name], reasoning, is_cut=True)
    assert (found.content, found.calls) == ("", [])
    assert found.reasoning == thought.removeprefix(reasoning.begins[0]).strip() or reasoning.begins[0] in thought


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_text_without_calls_is_kept(data: st.DataObject) -> None:
    """Marks and their beginnings in any order: nothing of them is lost, unless it is a mark that divides."""
    name = data.draw(st.sampled_from(sorted(OUTPUTS)))
    form = PARSED[name]
    marks = [mark for mark in form.marks if mark not in form.silent]
    parts = [*marks, *(mark[:-1] for mark in marks), "now", "{", "}", " ", "\n", "ab"]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=8)))
    found = read([text], form)
    if not found.calls:
        for mark in form.silent:
            text = text.replace(mark, "")
        assert found.content == text


@pytest.mark.parametrize("name", PARSED)
def test_a_cut_call_is_returned_as_far_as_it_goes(name: str) -> None:
    """The call's beginning is a beginning of the whole call, and calls before it are complete."""
    output = OUTPUTS[name][0]
    for length in range(len(output.text)):
        whole = [as_written(arguments) for _, arguments in output.calls]
        found = read([output.text[:length]], PARSED[name], is_cut=True)
        assert [call.name for call in found.calls] == [called for called, _ in output.calls][: len(found.calls)]
        for call, arguments in zip(found.calls, whole, strict=False):
            assert arguments.startswith(as_written(call.arguments))
    if len(output.calls) == 1:
        half = read([output.text[: output.text.index("K") + 1]], PARSED[name], is_cut=True)
        assert [call.name for call in half.calls] == ["weather"]
        assert not half.calls[0].is_whole


def as_written(arguments: str | dict[str, Any]) -> str:
    """JSON without white space, so that beginnings can be compared."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return re.sub(r"\s", "", text)


@pytest.mark.parametrize("name", PARSED)
def test_a_tool_that_is_not_offered_is_not_called(name: str) -> None:
    for output in OUTPUTS[name]:
        parser = OutputParser(None, PARSED[name], Offer(frozenset({"other"}), TYPES))
        text = parser.push(output.text).content + parser.finish().content
        assert not parser.calls
        if not any(mark in output.text for mark in PARSED[name].silent):
            assert text == output.text


@pytest.mark.parametrize("name", ["llama3_json", "pythonic", "xlam", "phi4_mini_json"])
@pytest.mark.parametrize("text", ['{"city": "Köln", ', "[1, 2, ", '["name", ', "[a] "])
def test_an_answer_that_only_begins_like_a_call_is_streamed(name: str, text: str) -> None:
    """JSON that is no call is not held back to its end."""
    parser = OutputParser(None, PARSED[name], OFFER)
    shown = parser.push(text + "x" * 1000).content
    assert len(shown) > 900
    assert shown + parser.finish().content == text + "x" * 1000


# ---- reasoning -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", REASONING.values(), ids=list(REASONING))
def test_reasoning_is_set_apart(form: ReasoningFormat) -> None:
    for begin in form.begins:
        for end in form.ends:
            text = f"{begin}\nIt is 4.\n\nYes.\n{end}\n\nFour.\n"
            for pieces in ([text], list(text)):
                found = read(pieces, None, form)
                assert (found.reasoning, found.content) == ("It is 4.\n\nYes.", "Four.\n")


@pytest.mark.parametrize("form", REASONING.values(), ids=list(REASONING))
def test_reasoning_that_the_prompt_began_is_set_apart(form: ReasoningFormat) -> None:
    for begin in ("", form.begins[0]):
        found = read(list(f"{begin}It is 4.{form.ends[0]}Four."), None, form, is_reasoning=True)
        assert (found.reasoning, found.content) == ("It is 4.", "Four.")
    assert form.is_open_after(f"<user>hm<assistant>{form.begins[0]}\n")
    assert not form.is_open_after(f"<user>hm<assistant>{form.begins[0]}\n\n{form.ends[0]}\n\n")


def test_reasoning_that_does_not_end_is_reasoning() -> None:
    found = read(["<think>It is ", "</thin"], None, REASONING["qwen3"], is_cut=True)
    assert (found.reasoning, found.content) == ("It is </thin", "")


def test_empty_reasoning_leaves_no_trace() -> None:
    found = read(list("<think>\n\n</think>\n\nFour."), None, REASONING["qwen3"])
    assert found == Read("Four.", "", [])


def test_harmony_is_reasoning_preamble_and_answer() -> None:
    text = (
        "<|channel|>analysis<|message|>It is 4.<|end|><|start|>assistant<|channel|>commentary<|message|>Soon."
        "<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    )
    for pieces in ([text], list(text)):
        found = read(pieces, PARSED["openai"], REASONING["openai_gptoss"])
        assert (found.reasoning, found.content, found.calls) == ("It is 4.", "Soon.Four.", [])


def test_an_answer_of_harmony_may_name_its_form() -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|>"
    text = thought + '<|start|>assistant<|channel|>final <|constrain|>json<|message|>{"a": 1}'
    for pieces in ([text], list(text)):
        assert read(pieces, PARSED["openai"], REASONING["openai_gptoss"]) == Read('{"a": 1}', "Hm.", [])


def test_a_call_follows_reasoning() -> None:
    for name, form in (("hermes", "qwen3"), ("openai", "openai_gptoss"), ("cohere_command3", "cohere_command3")):
        output, reasoning = OUTPUTS[name][0], REASONING[form]
        text = f"{reasoning.begins[0]}I look.{reasoning.ends[0]}\n{output.text}"
        found = read(list(text), PARSED[name], reasoning)
        assert (found.reasoning, found.content, values(found)) == ("I look.", "", list(output.calls))


def test_answers_of_hunyuan_ernie_and_granite_lose_their_wrapper() -> None:
    for name, tag in (("hunyuan_a13b", "answer"), ("ernie45", "response"), ("granite_thinking_parser", "response")):
        text = f"<think>\nIt is 4.\n</think>\n<{tag}>\nFour.\n</{tag}>"
        found = read(list(text), None, REASONING[name])
        assert (found.reasoning, found.content.strip()) == ("It is 4.", "Four.")
