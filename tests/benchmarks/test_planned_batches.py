"""``benchmarks.planned_batches``, without servers."""

import pytest

from benchmarks.common import EMBEDDED
from benchmarks.planned_batches import MMLU_OUT, Line, Outcome, check_answers, lines_of, outcome, planned_saving


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


def test_equal_answers_need_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.planned_batches.Reference", None)
    lines = [Line([7], 1), Line([8], 1)]
    assert check_answers(EMBEDDED, lines, [Outcome(1.0, 0.5, [[1], [2]])] * 2) == 0


def test_an_answer_that_the_reference_does_not_give_ends_the_run() -> None:
    lines = [Line([50, 60, 70, 80], 2)]
    runs = [Outcome(1.0, 0.5, [[1, 2]]), Outcome(1.0, 0.5, [[3, 4]])]
    with pytest.raises(SystemExit, match="wrong output"):
        check_answers(EMBEDDED, lines, runs)
