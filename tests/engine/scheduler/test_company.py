"""How many streams may run together: as many as keep their pace beside one another."""

import math

from neaptide.engine.interfaces import Prediction
from neaptide.engine.scheduler.prompts import Company
from neaptide.engine.steps.plan import BatchShape
from tests.engine.harness import Harness, online

READ_S = 1 / 64
TPOT_TOKENS = 64
"""Tokens that are read in a TPOT target; 57.6 of them in the pace."""


class PerRead:
    """Implements ``CostModel``: a time for each token that decodes read, next to none for prompts."""

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(READ_S * shape.decode_context_tokens + 1e-6 * shape.prefill_tokens, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None: ...


def company(*read_tokens: int, tpot_tokens: float = TPOT_TOKENS, least_tokens: float = 0.0) -> Company:
    streams = BatchShape()
    for tokens in read_tokens:
        streams.add_decodes(1, tokens, tokens)
    return Company(PerRead(), streams, tpot_tokens * READ_S, least_tokens * READ_S)


def test_one_more_may_join_while_all_keep_the_pace() -> None:
    assert company(30).has_room(27)
    assert not company(30).has_room(28)


def test_whoever_joins_is_read_too() -> None:
    found = company(20)
    found.join(20, math.inf)
    assert found.has_room(17)
    assert not found.has_room(18)


def test_the_first_always_has_room() -> None:
    assert company(tpot_tokens=math.inf).has_room(10**6)


def test_the_tightest_target_that_can_be_met_counts() -> None:
    found = company(tpot_tokens=math.inf)
    found.join(10, 20 * READ_S)
    found.join(5, 100 * READ_S)
    assert found.has_room(3)
    assert not found.has_room(4)


def test_a_target_that_cannot_be_met_keeps_nobody_out() -> None:
    found = company(30)
    found.join(10, 40 * READ_S)
    assert found.has_room(17)


def test_a_target_tighter_than_the_servers_counts_as_the_servers() -> None:
    assert company(30, tpot_tokens=40, least_tokens=TPOT_TOKENS).has_room(27)


def engine() -> Harness:
    return Harness(cost_model=PerRead(), delivery_latency_s=0.0, tpot_slo_s=TPOT_TOKENS * READ_S)


def ask(harness: Harness, name: str, num_tokens: int, max_tokens: int, ttft_slo_s: float) -> None:
    tpot_slo_s = TPOT_TOKENS * READ_S
    harness.core.handle(
        online(
            name,
            [ord(name[0])] * num_tokens,
            max_tokens=max_tokens,
            ttft_slo_s=ttft_slo_s,
            tpot_slo_s=tpot_slo_s,
            arrival_s=harness.clock.now(),
        )
    )


def test_a_chat_waits_for_the_end_of_one_beside_which_neither_would_keep_the_pace() -> None:
    harness = engine()
    ask(harness, "reads much", 40, 4, 50.0)
    harness.step()
    ask(harness, "waits", 30, 2, 50.0)
    assert harness.run() == [{"reads much": 1}] * 3 + [{"waits": 30}, {"waits": 1}]


def test_a_giant_without_room_keeps_out_no_small_one() -> None:
    harness = engine()
    ask(harness, "streams", 20, 100, 50.0)
    harness.step()
    ask(harness, "giant", 40, 2, 50.0)
    ask(harness, "small", 2, 2, 60.0)
    assert harness.step() == {"streams": 1, "small": 2}


def test_a_late_chat_joins_in_its_turn_all_the_same() -> None:
    harness = engine()
    ask(harness, "reads much", 40, 100, 50.0)
    harness.step()
    ask(harness, "late", 30, 2, 0.1)
    began = next(k for k in range(20) if "late" in harness.step())
    assert began == 1  # late chats earn credit with the first step in which one waits
