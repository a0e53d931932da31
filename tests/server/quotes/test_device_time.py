"""Device time of a batch, with that of its last answers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.messages import EngineReady
from neaptide.launch.device_time import device_time
from neaptide.server.quotes.work import BatchWork, DeviceTime

STEP_S = 0.5


def constant_device(
    max_num_seqs: int = 8, token_s: float = 0.0, prefill_factor: float = 1.0, decode_factor: float = 1.0
) -> DeviceTime:
    """Every step takes half a second, whatever it holds."""
    costs = {"kind": "constant", "seconds": STEP_S}
    found = device_time(
        EngineReady(
            "m",
            "cpu",
            "float32",
            256,
            1024,
            16,
            64,
            [0],
            costs=costs,
            max_step_tokens=1 << 20,
            max_num_seqs=max_num_seqs,
            offline_kv_tokens=1 << 30,
            token_s=token_s,
        ),
        prefill_factor,
        decode_factor,
    )
    assert found is not None
    return found


def work(rows: int, answer: float, limit: int | None) -> BatchWork:
    return BatchWork(rows, 10 * rows, 10 * rows, round(answer * rows), limit)


def test_answers_that_all_reach_their_limit_take_a_step_for_each_token() -> None:
    assert constant_device()(work(8, 10.0, 10)) == pytest.approx(10 * STEP_S)


def test_rows_that_run_at_once_take_as_long_as_the_longest_answer() -> None:
    """As drawn: eight answers of 20 tokens on average, without a limit."""
    drawn = np.random.default_rng(1).geometric(1 / 20, size=(20_000, 8)).max(axis=1)
    assert constant_device()(work(8, 20.0, 4096)) == pytest.approx(STEP_S * float(drawn.mean()), rel=0.02)


def test_the_last_answers_of_many_rows_go_on_when_no_row_waits() -> None:
    device, many = constant_device(), work(8000, 20.0, 4096)
    drawn = np.random.default_rng(1).geometric(1 / 20, size=(20_000, 8))
    # Those of a moment in the midst are as long from there on, and their tokens are no work of full steps.
    wanted_s = device(many._replace(longest_answer=None)) + STEP_S * float(
        (drawn.max(axis=1) - drawn.mean(axis=1)).mean()
    )
    assert device(many) == pytest.approx(wanted_s, abs=2 * STEP_S)


def test_beside_chats_prefill_takes_less_and_decodes_take_more() -> None:
    many = work(8000, 20.0, None)
    least_s, prefill_s = constant_device()(many), 80_000 * 1e-3
    found_s = constant_device(token_s=1e-3, prefill_factor=0.5, decode_factor=2.0)(many)
    assert found_s == pytest.approx(0.5 * prefill_s + 2.0 * (least_s - prefill_s))
    # A prompt's tokens never count as more than all of the work.
    assert constant_device(token_s=1e3, prefill_factor=0.5)(many) == pytest.approx(0.5 * least_s)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=st.integers(1, 400), limit=st.integers(1, 300), share=st.floats(0.0, 1.0), seats=st.integers(1, 32))
def test_last_answers_never_make_it_shorter_nor_longer_than_the_longest(
    rows: int, limit: int, share: float, seats: int
) -> None:
    device, whole = constant_device(seats), work(rows, max(share * limit, 1.0), limit)
    least_s = device(whole._replace(longest_answer=None))
    assert least_s <= device(whole) <= least_s + limit * STEP_S + 1e-6
