"""A step does not wait for masks: who has none samples nothing, and puts out the same later."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from neaptide.executors.grammar_masks import GrammarMasks, StepFill
from neaptide.executors.step_mask import Patience, StepMask
from neaptide.server.text.tokenizer import Tokenizer
from tests.executors.grammars.test_grammars import Run, ask_all, assert_valid, model, tokenizer

__all__ = ["model", "tokenizer"]  # fixtures


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Two of three masks are late the first time that they are asked for; counts whose."""
    collect = GrammarMasks._collect
    asked: Counter[tuple[str, bytes]] = Counter()
    found: Counter[str] = Counter()

    def collect_late(masks: GrammarMasks, fill: StepFill, patience: Patience | None) -> StepMask:
        mask = collect(masks, fill, None)
        for index, (request_id, place) in enumerate(zip(mask.request_ids, fill.places or [], strict=True)):
            assert place is not None
            key = request_id, place.output.tobytes()
            asked[key] += 1
            if asked[key] == 1 and (len(place.output) + index) % 3:
                found[request_id] += 1
                mask.late[request_id] = 0.0
                mask.bits[index] = -1
        return mask

    monkeypatch.setattr(GrammarMasks, "_collect", collect_late)
    return found


def ask_with_penalties(run: Run) -> None:
    ask_all(run)
    run.ask("3 counted", {"type": "array", "items": {"type": "boolean"}, "maxItems": 40}, frequency_penalty=0.7)


def calm_tokens(model: Path, depth: int, **options: Any) -> dict[str, list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarMasks, "_collect", ON_TIME)
        run = Run(model, depth, **options)
        ask_with_penalties(run)
        run.finish()
        return run.tokens


ON_TIME = GrammarMasks._collect


@pytest.mark.parametrize("depth", [0, 1])
def test_late_masks_change_no_token(model: Path, late: Counter[str], depth: int) -> None:
    run = Run(model, depth)
    ask_with_penalties(run)
    run.finish()
    assert late.total() > 60
    assert run.tokens == calm_tokens(model, depth)


def test_late_masks_and_preemptions_change_no_token(model: Path, late: Counter[str]) -> None:
    run = Run(model)
    ask_with_penalties(run)
    run.finish_with_preemptions()
    assert late.total() > 60
    assert sum(end.num_preemptions for end in run.ends.values()) > 10
    assert run.tokens == calm_tokens(model, 0)


def test_late_masks_in_steps_in_pieces_change_no_token(model: Path, late: Counter[str], tokenizer: Tokenizer) -> None:
    run = Run(model)
    run.executor._limit.lower(14)
    ask_all(run)
    run.finish()
    assert late.total() > 60
    assert_valid(run, tokenizer)


def test_free_text_goes_on_while_masks_are_late(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(masks: GrammarMasks, fill: StepFill, patience: Patience | None) -> StepMask:
        mask = ON_TIME(masks, fill, None)
        mask.late = dict.fromkeys(mask.request_ids, 1e-3)
        return mask

    monkeypatch.setattr(GrammarMasks, "_collect", never)
    run = Run(model)
    run.ask("0 bound", {"type": "integer"})
    run.add("free", [9, 10, 11], max_tokens=30)
    while "free" not in run.ends:
        run.step()
    assert (len(run.tokens["free"]), run.tokens["0 bound"]) == (30, [])
    (bound,) = run.core.scheduler.queues.running_online.values()
    assert bound.put_off_s == 0.0  # the table knows
    assert run.core.scheduler.queues.table.put_off_s[bound.slot] > 0.0
