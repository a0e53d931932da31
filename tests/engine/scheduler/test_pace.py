"""The pace of offline prompts beside offline decodes, to the token."""

import pytest

from neaptide.engine.interfaces import CostModel, Prediction
from neaptide.engine.scheduler.budget import Reads, StepBudget
from neaptide.engine.scheduler.pace import EVEN_PROMPTS, PromptPace
from neaptide.engine.steps.plan import BatchShape

TOKEN_S = 1 / 64
STEP_TOKENS, DECODES = 2048, 16
PROMPT_TOKENS, ANSWER_TOKENS = 64, 8
EVEN = DECODES * PROMPT_TOKENS // ANSWER_TOKENS + 1
"""Tokens that keep up with the rows that end, and the part of one that is rounded up."""


class Weights:
    """Implements ``CostModel``: reading the weights takes as long as 128 tokens, beside which they are computed."""

    def __init__(self, margin_s: float = 0.0, prompt_s: float = 0.0) -> None:
        self._margin_s, self._prompt_s = margin_s, prompt_s

    def predict(self, shape: BatchShape) -> Prediction:
        own_s = self._prompt_s * bool(shape.prefill_requests)
        return Prediction(max(shape.num_tokens, 128) * TOKEN_S + own_s, self._margin_s)

    def observe(self, shape: BatchShape, seconds: float) -> None: ...


def chunk(
    model: CostModel, *, unfinished: int = 0, room: int = 0, seats: int = 100, decodes: int = DECODES, ended: int = 5
) -> int:
    pace, budget = PromptPace(), StepBudget(model, STEP_TOKENS)
    for _ in range(ended):
        pace.observe_admission(PROMPT_TOKENS)
        pace.observe_end(ANSWER_TOKENS)
    if decodes:
        budget.add_decodes(decodes, Reads(decodes, 1))
    return pace.chunk_tokens(budget, decodes, unfinished, 0, room, seats)


def test_prompts_keep_up_with_the_rows_that_end() -> None:
    assert chunk(Weights()) == EVEN == 129


def test_a_few_prompts_behind_do_not_hurry() -> None:
    assert chunk(Weights(), unfinished=int(EVEN_PROMPTS - 1) * PROMPT_TOKENS, room=2 * PROMPT_TOKENS - 1) == EVEN


@pytest.mark.parametrize("behind", [{"unfinished": 16 * PROMPT_TOKENS}, {"room": 16 * PROMPT_TOKENS}])
def test_with_many_prompts_behind_the_pace_rises(behind: dict[str, int]) -> None:
    # Twice as many as may be behind: twice the pace, of 16 rows and 8 to come.
    assert chunk(Weights(), **behind) == 2 * (DECODES + 8) * PROMPT_TOKENS // ANSWER_TOKENS + 1


def test_memory_without_seats_is_no_room() -> None:
    assert chunk(Weights(), room=100 * PROMPT_TOKENS, seats=2) == EVEN


def test_no_room_but_headroom_that_is_taken_is_none() -> None:
    assert chunk(Weights(), room=-1000, seats=-1) == EVEN


@pytest.mark.parametrize("unknown", [{"decodes": 0}, {"ended": 0}])
def test_without_decodes_or_lengths_a_step_is_filled(unknown: dict[str, int]) -> None:
    assert chunk(Weights(), **unknown) == STEP_TOKENS - unknown.get("decodes", DECODES)


def test_a_step_is_filled_where_prompts_have_a_cost_of_their_own() -> None:
    assert chunk(Weights(prompt_s=10.0)) == STEP_TOKENS - DECODES


def test_fewer_tokens_must_be_cheaper_by_more_than_the_model_errs() -> None:
    # 129 tokens take 17 tokens' time beside the weights, 2,032 take 1,920: 0.13 and 0.94 each.
    assert chunk(Weights(margin_s=100 * TOKEN_S)) == EVEN  # 0.91 with the error
    assert chunk(Weights(margin_s=120 * TOKEN_S)) == STEP_TOKENS - DECODES  # 1.06


def test_where_all_tokens_cost_the_same_a_step_is_filled() -> None:
    assert chunk(Weights(), decodes=128) == STEP_TOKENS - 128


def test_an_answer_without_tokens_says_nothing() -> None:
    pace = PromptPace()
    pace.observe_admission(PROMPT_TOKENS)
    pace.observe_end(0)
    budget = StepBudget(Weights(), STEP_TOKENS)
    budget.add_decodes(1, Reads(1, 1))
    assert pace.chunk_tokens(budget, 1, 0, 0, 0, 1) == STEP_TOKENS - 1
