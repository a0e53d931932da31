"""What is recorded of the traffic that an engine serves."""

from pathlib import Path

import numpy as np
import pytest

from neaptide.engine.messages import CancelBatch, SetOffline, TellTraffic, Traffic
from neaptide.engine.params import FinishReason
from neaptide.engine.record.traffic import NAME_BYTES, TrafficPiece, traffic_decoder
from neaptide.engine.record.traffic_recorder import COSTS_S, PIECE_S, TrafficRecorder
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from tests.engine.harness import Harness, batch, flex, online

COSTS = {"kind": "constant", "seconds": 0.01}
NUM_BLOCKS = 64


def recording(told_s: float = 0.01, **scheduler: object) -> tuple[Harness, TrafficRecorder]:
    """``told_s``: step times as they are told; steps take 10 ms."""
    harness = Harness(NUM_BLOCKS, **scheduler)  # type: ignore[arg-type]
    recorder = TrafficRecorder(harness.core.scheduler, NUM_BLOCKS, lambda: (COSTS, ConstantCostModel(told_s)))
    harness.core.subscribe(recorder)
    return harness, recorder


def read(taken: list[Traffic]) -> list[TrafficPiece]:
    return [traffic_decoder.decode(traffic.piece) for traffic in taken]


def test_a_request_is_recorded_as_it_was() -> None:
    harness, recorder = recording()
    harness.core.handle(online("a", [7] * 10, max_tokens=4, ttft_slo_s=0.5))
    harness.run()
    (piece,) = read(recorder.take(PIECE_S))
    (served,) = piece.ended
    assert (served.request_id, served.prompt_tokens, served.output_tokens, served.max_tokens) == ("a", 10, 4, 4)
    assert (served.arrival_s, served.ttft_slo_s, served.reason) == (0.0, 0.5, FinishReason.LENGTH)
    assert (served.first_token_s, served.ended_s) == pytest.approx((0.01, 0.04))
    assert len(served.blocks) == 3 * NAME_BYTES  # of 4 tokens; the last token's was never computed
    assert piece.num_steps == 4
    assert piece.costs == COSTS


def test_equal_beginnings_have_equal_names_and_no_text() -> None:
    harness, recorder = recording()
    for request_id, tail in (("a", 8), ("b", 9)):
        harness.core.handle(online(request_id, [7] * 8 + [tail] * 4, max_tokens=1))
    harness.run()
    taken = recorder.take(PIECE_S)
    ((first, second),) = (piece.ended for piece in read(taken))
    names = [[one.blocks[k : k + NAME_BYTES] for k in range(0, 3 * NAME_BYTES, NAME_BYTES)] for one in (first, second)]
    assert names[0][:2] == names[1][:2]
    assert names[0][2] != names[1][2]
    assert bytes([7, 7, 7, 7]) not in taken[0].piece
    assert np.array([7] * 4, np.int32).tobytes() not in taken[0].piece


@pytest.mark.parametrize(("told_s", "units"), [(0.01, 0), (0.02, -14), (0.005, 14), (1e-9, 100)])
def test_errors_are_those_of_the_step_times_that_were_told_last(told_s: float, units: int) -> None:
    """In twentieths of a logarithm, a hundred at most; of the steps before the first were told there are none."""
    harness, recorder = recording(told_s)
    for number, errors in enumerate(({}, {units: 4}, {units: 4})):
        harness.core.handle(online(str(number), [7 + number] * 10, max_tokens=4))
        harness.run()
        (piece,) = read(recorder.take(PIECE_S * (number + 1)))
        assert (piece.num_steps, piece.errors) == (4, errors)
        told = 4 * told_s if errors else 0.0
        assert (piece.measured_s, piece.predicted_s) == pytest.approx((0.04 if errors else 0.0, told))


def test_pieces_come_when_they_are_due_and_something_has_happened() -> None:
    harness, recorder = recording()
    assert recorder.take(PIECE_S) == []
    harness.core.handle(online("a", [7] * 4, max_tokens=1))
    harness.run()
    assert len(recorder.take(10.0)) == 1
    harness.core.handle(online("b", [7] * 4, max_tokens=1))
    harness.run()
    assert recorder.take(10.0 + PIECE_S / 2) == []
    (piece,) = read(recorder.take(10.0 + PIECE_S))
    assert [one.request_id for one in piece.ended] == ["b"]
    assert piece.costs is None
    harness.core.handle(online("c", [7] * 4, max_tokens=1))
    harness.run()
    assert read(recorder.take(10.0 + COSTS_S))[0].costs == COSTS


def test_offline_tokens_count_prompts_found_or_computed_and_answers(tmp_path: Path) -> None:
    harness, recorder = recording(max_num_batched_tokens=8)
    harness.core.handle(batch(tmp_path, "job", [[9] * 12, [9] * 12], max_tokens=3))
    harness.core.handle(online("a", [7] * 8, max_tokens=2))
    counts = []
    while harness.core.has_work:
        harness.step()
        counts.append(read(recorder.take(PIECE_S * (len(counts) + 1)))[0].offline_tokens)
    assert counts == sorted(counts)
    assert counts[-1] == 2 * (12 + 3)


def test_what_the_engine_has_is_told_when_it_is_asked(tmp_path: Path) -> None:
    harness, recorder = recording(max_num_seqs=3)
    job = batch(tmp_path, "job", [[9, k] * 4 for k in range(5)], max_tokens=20)
    harness.core.handle(job)
    harness.core.handle(online("a", [7] * 8, max_tokens=20))
    harness.core.handle(flex("f", [6] * 8, max_tokens=20))
    for _ in range(3):
        harness.step()
    harness.core.handle(TellTraffic())
    ordinary, asked = recorder.take(0.1)
    assert (ordinary.has_present, asked.has_present) == (False, True)
    piece = read([asked])[0]
    present = piece.present
    assert present is not None
    assert piece.ended == []
    assert (present.block_size, present.num_blocks, present.scheduler.max_num_seqs) == (4, NUM_BLOCKS, 3)
    assert {"a", "f"} <= {one.request_id for one in present.requests}
    assert all(one.reason is None and one.ended_s == 0 for one in present.requests)
    started = {int(one.request_id.partition(":")[2]) for one in present.requests if one.request_id.startswith("job")}
    (waiting,) = present.waiting
    assert started
    assert sorted([*np.frombuffer(waiting.rows, np.int32).tolist(), *started]) == list(range(5))
    assert set(np.frombuffer(waiting.max_tokens, np.int32).tolist()) == {20}
    assert waiting.stem == job.path
    assert recorder.take(0.2) == []


def test_a_pause_is_told_until_the_piece_behind_it() -> None:
    harness, recorder = recording()
    flags = []
    for at, paused in enumerate((None, True, None, False, None)):
        if paused is not None:
            harness.core.handle(SetOffline(paused))
        harness.core.handle(online(f"r{at}", [7] * 4, max_tokens=1))
        harness.run()
        flags += [piece.is_paused for piece in read(recorder.take(PIECE_S * (at + 1)))]
    assert flags == [False, True, True, True, False]


def test_a_pause_between_two_pieces_is_told() -> None:
    harness, recorder = recording()
    for paused in (True, False):
        harness.core.handle(SetOffline(paused))
    harness.core.handle(online("a", [7] * 4, max_tokens=1))
    harness.run()
    assert [piece.is_paused for piece in read(recorder.take(PIECE_S))] == [True]


def test_offline_tokens_are_counted_while_a_row_runs(tmp_path: Path) -> None:
    harness, recorder = recording(max_num_batched_tokens=8)
    harness.core.handle(batch(tmp_path, "job", [[9] * 12], max_tokens=3))
    counts = []
    while harness.core.has_work:
        harness.step()
        counts.append(read(recorder.take(PIECE_S * (len(counts) + 1)))[0].offline_tokens)
    assert counts == [8, 13, 14, 15]


def test_a_cancelled_batch_leaves_what_it_did(tmp_path: Path) -> None:
    harness, recorder = recording(max_num_seqs=1)
    harness.core.handle(batch(tmp_path, "job", [[9] * 8, [8] * 8], max_tokens=5))
    for _ in range(2):
        harness.step()
    harness.core.handle(CancelBatch("job"))
    (piece,) = read(recorder.take(PIECE_S))
    assert [(one.request_id, one.reason) for one in piece.ended] == [("job:0", FinishReason.ABORT)]
    assert piece.offline_tokens == 8 + 2


def test_what_goes_wrong_ends_the_record_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    harness, recorder = recording()
    recorder._ended = None  # type: ignore[assignment]
    harness.core.handle(online("a", [7] * 4, max_tokens=2))
    harness.run()
    assert harness.reason("a") is FinishReason.LENGTH
    assert recorder.failed
    assert recorder.take(PIECE_S) == []
    assert "the traffic record has failed" in caplog.text
