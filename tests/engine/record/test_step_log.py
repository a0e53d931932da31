"""What the recorder writes. That a log holds all that a replay needs is shown in test_replay.py."""

import errno
import gzip
import io
import zlib
from pathlib import Path

import pytest

from neaptide.engine.clock import VirtualClock
from neaptide.engine.config import EngineConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.engine.messages import AbortRequest, AddRequest, CancelBatch, SetOffline
from neaptide.engine.params import FinishReason, SamplingParams, Tier
from neaptide.engine.record.step_log import (
    AbortLine,
    AddLine,
    HeaderLine,
    OfflineLine,
    RowLine,
    StepLine,
    create_log,
    read_log,
)
from neaptide.engine.record.step_recorder import StepRecorder
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from neaptide.executors.simulated.hash_executor import SimExecutor
from neaptide.simulation.simulator import simulate
from tests.engine.harness import batch
from tests.golden.renew import GOLDEN_LOG, write_log
from tests.simulation.scenes import constant, mixed, offline, online


def test_the_golden_log_is_made_again_byte_for_byte(tmp_path: Path) -> None:
    """If decisions have changed on purpose: ``python -m tests.golden.renew``, and look at the difference."""
    run = write_log(tmp_path / "log")
    assert sum(run.result.preemptions.count_by_class.values()) > 10
    assert GOLDEN_LOG.stat().st_size < 100_000
    assert (tmp_path / "log").read_text() == GOLDEN_LOG.read_text()


def test_a_step_by_step_log_by_hand(tmp_path: Path) -> None:
    """Prompt of 9 tokens in chunks of 5, three outputs, blocks of 4."""
    simulate(constant(online((0.0, 9, 3)), max_num_batched_tokens=5), step_log=tmp_path / "log")
    header, add, *steps = read_log(tmp_path / "log")
    assert isinstance(header, HeaderLine)
    assert header.scheduler.policy == "neaptide"
    assert add == AddLine("online-0", Tier.DEFAULT, 0.0, 10.0, 10.0, 247, 9, [0, 2])
    first, second, third, fourth = (step for step in steps if isinstance(step, StepLine))
    assert (first.t, first.chunks, first.admit) == ([0.0, 0.1], [(0, 5)], [(0, 0)])
    assert (second.chunks, second.join, second.admit) == ([(0, 4)], [], [])
    assert (third.chunks, third.join, third.leave, third.end) == ([], [0], [], [])
    assert (fourth.join, fourth.leave) == ([], [])
    # Two kept output tokens and the end token; the third block, 9th token and two outputs, is not full.
    assert fourth.end == [(0, 2, FinishReason.STOP, [])]
    assert [step.kv for step in (first, second, third, fourth)] == [[0, 2, 0], [0, 3, 0], [0, 3, 0], [2, 0, 0]]


def test_equal_prefixes_are_equal_block_numbers(tmp_path: Path) -> None:
    simulate(constant((), [offline((8, 4, 1), (8, 4, 1), (0, 8, 1))]), step_log=tmp_path / "log")
    rows = [line for line in read_log(tmp_path / "log") if isinstance(line, RowLine)]
    assert rows[:3] == [RowLine(0, [0, 3]), RowLine(1, [0, 2, 3, 1]), RowLine(2, [4, 2])]


def test_a_log_holds_no_token_of_a_prompt(tmp_path: Path) -> None:
    secret = 123_456_789
    out = io.BytesIO()
    recorder = StepRecorder(out, EngineConfig(), 64, {})
    params = SamplingParams(max_tokens=4)
    recorder.message(AddRequest("a", [secret] * 40, params, Tier.PRIORITY, 0.0, 1.0, 0.1, b"salt"), 0.0)
    assert b"salt" not in out.getvalue()
    assert str(secret).encode() not in out.getvalue()
    assert b'"tokens":40,"blocks":[0,2]' in out.getvalue().replace(b"[1,2]", b"[0,2]")


def test_salts_keep_equal_text_apart() -> None:
    out = io.BytesIO()
    recorder = StepRecorder(out, EngineConfig(), 64, {})
    for name, salt in (("a", b"x"), ("b", b"y"), ("c", b"x")):
        recorder.message(AddRequest(name, [9] * 16, SamplingParams(), Tier.DEFAULT, 0.0, 1.0, 0.1, salt), 0.0)
    a, b, c = out.getvalue().splitlines()[1:]
    blocks = [line.partition(b'"blocks":')[2] for line in (a, b, c)]
    assert blocks[0] == blocks[2] != blocks[1]


def test_aborts_and_the_operators_switch_are_written() -> None:
    out = io.BytesIO()
    recorder = StepRecorder(out, EngineConfig(), 64, {})
    recorder.message(AbortRequest(["a", "b"], FinishReason.STOP), 1.0)
    recorder.message(SetOffline(True), 2.0)
    out.seek(0)
    path_lines = out.getvalue().splitlines()[1:]
    assert path_lines == [b'{"is":"abort","ids":["a","b"],"reason":0,"now_s":1.0}', b'{"is":"offline","paused":true}']


def test_lines_are_read_as_written(tmp_path: Path) -> None:
    with create_log(tmp_path / "log.gz") as out:
        recorder = StepRecorder(out, EngineConfig(), 64, {"seed": 3})
        recorder.message(AbortRequest(["a"]), 1.0)
        recorder.message(SetOffline(False), 2.0)
    header, *lines = read_log(tmp_path / "log.gz")
    assert isinstance(header, HeaderLine)
    assert header.recipe == {"seed": 3}
    assert lines == [AbortLine(["a"], FinishReason.ABORT, 1.0), OfflineLine(False)]


@pytest.mark.parametrize("name", ["log", "log.gz"])
def test_a_log_ends_at_its_largest_size_and_can_be_read_to_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    recorder = StepRecorder(create_log(tmp_path / name, max_bytes=20_000), EngineConfig(), 64, {})
    for number in range(2_000):
        recorder.message(AbortRequest([f"{number} {number**20}"]), float(number))
    recorder.close()
    assert recorder.failed
    assert [record.getMessage() for record in caplog.records] == [
        "the step log cannot be written: [Errno 27] it has reached its size limit"
    ]
    assert 10_000 < (tmp_path / name).stat().st_size <= 20_000
    _, *lines = read_log(tmp_path / name)
    assert [line.now_s for line in lines if isinstance(line, AbortLine)] == [float(n) for n in range(len(lines))]
    assert len(lines) > 100


def test_a_log_is_its_owners_alone(tmp_path: Path) -> None:
    create_log(tmp_path / "log").close()
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_a_compressed_log_is_the_same_log_and_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz", "plain"):
        simulate(mixed(num_online=4, num_rows=4, refill=False), step_log=tmp_path / name)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == (tmp_path / "plain").read_bytes()


def test_a_full_disk_ends_the_log_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    class FullDisk(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "no space left")

    recorder = StepRecorder(FullDisk(), EngineConfig(), 64, {})
    recorder.message(SetOffline(True), 0.0)
    assert recorder.failed
    assert len(caplog.records) == 1


class FullAtTheEnd(io.BytesIO):
    """A buffered file on a full disk: closing it writes."""

    def close(self) -> None:
        if not self.closed:
            super().close()
            raise OSError(errno.ENOSPC, "no space left")


def test_a_disk_that_is_full_when_the_log_is_closed_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    recorder = StepRecorder(FullAtTheEnd(), EngineConfig(), 64, {})
    recorder.close()
    assert recorder.failed
    assert [record.getMessage() for record in caplog.records] == [
        "the step log cannot be written: [Errno 28] no space left"
    ]


def test_a_simulation_says_that_its_log_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neaptide.simulation.simulator.create_log", lambda path: FullAtTheEnd())
    with pytest.raises(OSError, match="could not be written"):
        simulate(constant(online((0.0, 9, 3))), step_log=tmp_path / "log")


def test_a_recorder_that_fails_harms_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(StepRecorder, "_add", raises)
    clock = VirtualClock()
    recorder = StepRecorder(create_log(tmp_path / "log"), EngineConfig(), 64, {})
    executor = SimExecutor(64, ConstantCostModel(0.01), clock, vocab_size=1000)
    core = EngineCore(
        EngineConfig(), executor, ConstantCostModel(0.01), FixedHeadroom(64, 0.0), clock, observers=[recorder]
    )
    core.handle(AddRequest("a", [9] * 16, SamplingParams(max_tokens=2), Tier.DEFAULT, 0.0, 1.0, 0.1))
    core.handle(AddRequest("b", [9] * 16, SamplingParams(max_tokens=2), Tier.DEFAULT, 0.0, 1.0, 0.1))
    reasons = []
    while core.has_work:
        reasons += [o.finish_reason for o in core.step().outputs if o.finish_reason is not None]
    recorder.close()
    assert reasons == [FinishReason.LENGTH, FinishReason.LENGTH]
    assert recorder.failed
    assert len(caplog.records) == 1
    assert len(list(read_log(tmp_path / "log"))) == 1


def test_a_batch_is_logged_row_by_row_as_the_scheduler_comes_to_them(tmp_path: Path) -> None:
    """Two at a time: what the engine is told costs nothing for the rows that wait."""
    simulate(constant((), [offline(*[(8, 4, 3)] * 5)], max_num_seqs=2, refill=False), step_log=tmp_path / "log")
    kinds = [type(line).__name__ for line in read_log(tmp_path / "log")]
    assert kinds[1:5] == ["BatchLine", "RowLine", "RowLine", "StepLine"], "two run, there is no seat for the third"
    assert kinds.count("RowLine") == 5


def test_nothing_is_kept_of_requests_that_are_refused_or_cancelled(tmp_path: Path) -> None:
    clock = VirtualClock()
    recorder = StepRecorder(io.BytesIO(), EngineConfig(), 4, {})
    executor = SimExecutor(4, ConstantCostModel(0.01), clock, vocab_size=1000)
    core = EngineCore(
        EngineConfig(), executor, ConstantCostModel(0.01), FixedHeadroom(4, 0.0), clock, observers=[recorder]
    )
    core.handle(AddRequest("long", [9] * 999, SamplingParams(max_tokens=2), Tier.DEFAULT, 0.0, 1.0, 0.1))
    core.handle(batch(tmp_path, "job", [[9] * 8, [9] * 999, [], [8] * 8, [8] * 40, [8] * 40]))
    assert recorder.num_open == 5  # four rows, and their file
    core.step()
    core.handle(CancelBatch("job"))
    assert recorder.num_open == 0
    assert not recorder.failed


def test_what_is_no_step_log_is_refused(tmp_path: Path) -> None:
    for name, text, message in (
        ("damaged", b'{"is":"header"}\n', "line 1"),
        ("headless", b'{"is":"offline","paused":true}\n', "one header"),
        ("foreign", b"not json\n", "line 1"),
    ):
        (tmp_path / name).write_bytes(text)
        with pytest.raises(ValueError, match=message):
            list(read_log(tmp_path / name))


def test_a_log_of_another_version_is_refused(tmp_path: Path) -> None:
    text = GOLDEN_LOG.read_text().replace('"version":3', '"version":99', 1)
    (tmp_path / "log").write_text(text)
    with pytest.raises(ValueError, match="version 99"):
        list(read_log(tmp_path / "log"))


@pytest.mark.parametrize(("position", "error"), [(10, zlib.error), (-5, gzip.BadGzipFile)])
def test_a_damaged_compressed_log_is_refused(position: int, error: type[Exception], tmp_path: Path) -> None:
    """In its first compressed block, or in its checksum."""
    write_log(tmp_path / "log.gz")
    content = bytearray((tmp_path / "log.gz").read_bytes())
    content[position] ^= 0xFF
    (tmp_path / "log.gz").write_bytes(content)
    with pytest.raises(error):
        gzip.decompress(content)
    with pytest.raises(ValueError, match=r"log\.gz"):
        list(read_log(tmp_path / "log.gz"))


@pytest.mark.parametrize("name", ["log", "log.gz"])
def test_a_log_that_was_cut_off_is_read_as_far_as_it_goes(name: str, tmp_path: Path) -> None:
    write_log(tmp_path / name)
    whole = list(read_log(tmp_path / name))
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) * 3 // 4])
    part = list(read_log(tmp_path / name))
    assert len(whole) // 2 < len(part) < len(whole)
    assert part == whole[: len(part)]
