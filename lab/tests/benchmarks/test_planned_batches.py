"""``lab.benchmarks.planned_batches``, without servers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from benchmarks.common import EMBEDDED, Reference
from benchmarks.vllm_server import Machine
from lab.benchmarks.planned_batches import (
    MMLU_OUT,
    PLANNED,
    UNORDERED,
    VLLM,
    Differences,
    Line,
    Outcome,
    Setting,
    check_answers,
    finding,
    lines_of,
    outcome,
    planned_saving,
    run_all,
)


def test_half_of_the_lines_are_of_each_set_and_share_long_heads() -> None:
    lines = lines_of(EMBEDDED, 20)
    arithmetic = [line.prompt for line in lines if line.max_tokens != MMLU_OUT]
    assert len(arithmetic) == 10
    assert 0 < len(lines) - len(arithmetic) <= 10  # what is longer than the context is left out
    assert len({tuple(prompt[:500]) for prompt in arithmetic}) == 1
    assert planned_saving(lines, 16) > 0.3


def test_the_plan_counts_whole_blocks() -> None:
    lines = [Line([7] * 40, 1), Line([7] * 40, 1), Line([8] * 20, 1)]
    assert planned_saving(lines, 16) == 32 / 100
    assert planned_saving(lines, 8) == 40 / 100


def body(prompt_tokens: int, details: dict[str, int] | None, token_ids: list[int]) -> dict[str, object]:
    usage = {"prompt_tokens": prompt_tokens, "prompt_tokens_details": details}
    return {"usage": usage, "choices": [{"token_ids": token_ids}]}


def test_what_is_saved_is_what_the_replies_say() -> None:
    found = outcome(2.0, [body(60, {"cached_tokens": 32}, [1]), body(40, None, [2, 3])])
    assert found == Outcome(2.0, 0.32, [[1], [2, 3]])


class FakeReference:
    """Has close calls at stated places of an answer, and says the stated tokens elsewhere."""

    def __init__(self, tokens: list[int], close: int | None) -> None:
        self.tokens, self.close = tokens, close
        self.asked: list[list[int]] = []

    def agreement(self, prompt: Sequence[int], tokens: Sequence[int]) -> int:
        self.asked.append([*prompt])
        for place, token in enumerate(tokens):
            if place == self.close:
                return place
            if token != self.tokens[place]:
                raise SystemExit("wrong output")
        return len(tokens)


def differences(reference: FakeReference, *answers: list[list[int]], most: int | None = None) -> Differences:
    lines = [Line([7, k], len(one)) for k, one in enumerate(answers[0])]
    return check_answers(cast(Reference, reference), lines, [Outcome(1.0, 0.5, one) for one in answers], most)


def test_equal_answers_need_no_reference() -> None:
    reference = FakeReference([1, 2], None)
    assert differences(reference, [[1], [2]], [[1], [2]]) == Differences()
    assert reference.asked == []


@pytest.mark.parametrize(
    ("close", "first", "second", "wrong"),
    [
        (1, [1, 2, 3], [1, 9, 3], []),  # they part at the close call
        (0, [1, 2, 3], [1, 9, 3], []),  # and behind it
        (2, [1, 2, 3], [1, 9, 3], [0]),  # and before it: the second is wrong
        (2, [1, 9, 3], [1, 2, 3], [0]),  # the first is
        (None, [9, 2, 3], [8, 2, 3], [0]),  # both are
    ],
)
def test_answers_part_at_a_close_call_or_one_is_wrong(
    close: int | None, first: list[int], second: list[int], wrong: list[int]
) -> None:
    found = differences(FakeReference([1, 2, 3], close), [first], [second])
    assert (list(found.partings), found.checked, found.wrong) == ([0], 1, wrong)


def test_the_third_run_is_compared_as_well() -> None:
    found = differences(FakeReference([1, 2], None), [[1, 2]], [[1, 2]], [[1, 3]])
    assert (found.partings, found.wrong) == ({0: 1}, [0])


def test_of_many_differing_lines_so_many_are_held_against_the_reference() -> None:
    reference = FakeReference([5], 0)
    found = differences(reference, [[1]] * 6, [[2]] * 6, most=2)
    assert (len(found.partings), found.checked, found.wrong, len(reference.asked)) == (6, 2, [], 2)


def test_an_answer_that_the_model_does_not_give_is_wrong() -> None:
    found = check_answers(
        Reference(EMBEDDED), [Line([50, 60, 70, 80], 2)], [Outcome(1.0, 0.5, [[1, 2]]), Outcome(1.0, 0.5, [[3, 4]])]
    )
    assert found.wrong == [0]


def test_a_setting_holds_with_the_planned_saving_and_an_unordered_run() -> None:
    lines = [Line([7] * 40, 1), Line([7] * 40, 1), Line([8] * 20, 1)]
    setting = Setting("torch", lines, 16, EMBEDDED, [], None)
    reference = cast(Reference, FakeReference([1], None))
    answers = [[1], [1], [1]]
    near, unordered = Outcome(2.0, 0.315, answers), Outcome(3.0, 0.1, answers)
    found = finding(setting, {PLANNED: near, UNORDERED: unordered}, reference, None)
    assert (found["planned_saving"], found["wall_time_ratios"], found["holds"]) == (0.32, {UNORDERED: 1.5}, True)
    assert not finding(setting, {PLANNED: near}, reference, None)["holds"]
    assert not finding(setting, {UNORDERED: unordered}, reference, None)["holds"]
    far = Outcome(2.0, 0.305, answers)
    assert not finding(setting, {PLANNED: far, UNORDERED: unordered}, reference, None)["holds"]
    other = Outcome(3.0, 0.1, [[1], [1], [2]])
    assert finding(setting, {PLANNED: near, UNORDERED: other}, reference, None)["wrong_lines"] == [2]
    assert not finding(setting, {PLANNED: near, UNORDERED: other}, reference, None)["holds"]


def test_what_does_not_end_in_time_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(Path("python"), 2, "bfloat16", 32, 0.5, True, "cpu", 4096)
    settings = [Setting("torch", [], 16, EMBEDDED, [], None), Setting("vllm", [], 32, EMBEDDED, [], machine)]
    asked: list[tuple[str, str]] = []

    async def run(setting: Setting, name: str) -> Outcome:
        asked.append((setting.executor, name))
        if len(asked) == 4:
            await asyncio.Event().wait()
        return Outcome(1.0, 0.5, [])

    monkeypatch.setattr(Setting, "run", run)
    assert asyncio.run(run_all(settings, 0.0)) == [
        {PLANNED: Outcome(1.0, 0.5, []), UNORDERED: Outcome(1.0, 0.5, [])},
        {PLANNED: Outcome(1.0, 0.5, [])},
    ]
    assert asked == [("torch", PLANNED), ("torch", UNORDERED), ("vllm", PLANNED), ("vllm", VLLM)]
