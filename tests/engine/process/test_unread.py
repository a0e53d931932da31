"""Rows whose token file cannot be read now wait in the engine; they are not refused."""

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from neaptide.engine.core import READ_AGAIN_S
from neaptide.engine.messages import AddBatch, CancelBatch, FromEngine, Shutdown, ToEngine
from neaptide.engine.params import FinishReason
from neaptide.engine.process.loop import run_engine
from tests.engine.harness import Harness, batch
from tests.engine.process.test_publishing import READY


def short_of(harness: Harness, monkeypatch: pytest.MonkeyPatch, *errors: OSError) -> None:
    """The engine's next tries to take rows in fail."""
    pool, left = harness.core.scheduler.queues.pool, list(errors)
    add_batch = pool.add_batch

    def tried(message: AddBatch, now_s: float, max_num_tokens: int) -> list[int]:
        if left:
            raise left.pop(0)
        return add_batch(message, now_s, max_num_tokens)

    monkeypatch.setattr(pool, "add_batch", tried)


def too_many(tries: int = 1) -> list[OSError]:
    return [OSError(errno.EMFILE, "too many open files")] * tries


def test_rows_wait_until_their_file_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    short_of(harness, monkeypatch, *too_many(2))
    harness.core.handle(batch(tmp_path, "b", [[7, 8], [9, 10]]))
    for _ in range(2):  # at once, for which it is too early, and a second later
        harness.core.read_again()
        assert not harness.core.has_work
        harness.clock.sleep_until(harness.clock.now() + READ_AGAIN_S)
    harness.core.read_again()
    harness.run()
    assert {name: harness.reason(name) for name in harness.ends} == dict.fromkeys(("b:0", "b:1"), FinishReason.LENGTH)


def test_a_batch_that_is_cancelled_meanwhile_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    short_of(harness, monkeypatch, *too_many(2))
    for name in ("a", "b"):
        harness.core.handle(batch(tmp_path, name, [[7, 8]]))
    harness.core.handle(CancelBatch("a"))
    harness.clock.sleep_until(READ_AGAIN_S)
    harness.core.read_again()
    harness.run()
    assert list(harness.ends) == ["b:0"]


@pytest.mark.parametrize("harm", ["away", "torn"])
def test_rows_whose_file_is_away_or_torn_wait_until_it_is_back(tmp_path: Path, harm: str) -> None:
    harness = Harness()
    message = batch(tmp_path, "b", [[7, 8]])
    path = Path(f"{message.path}.offsets")
    content = path.read_bytes()
    path.unlink() if harm == "away" else path.write_bytes(content[:-8])
    harness.core.handle(message)
    harness.run()
    assert harness.ends == {}
    path.write_bytes(content)
    harness.clock.sleep_until(READ_AGAIN_S)
    harness.core.read_again()
    harness.run()
    assert harness.reason("b:0") is FinishReason.LENGTH


def test_an_idle_engine_comes_back_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    short_of(harness, monkeypatch, *too_many())
    ended: list[str] = []

    class Line:
        """Hands out the batch, then nothing for as long as it waits, then the end."""

        messages: list[ToEngine] = [batch(tmp_path, "b", [[7, 8]])]

        def poll(self, timeout_s: float) -> Sequence[ToEngine]:
            harness.clock.sleep_until(harness.clock.now() + timeout_s)
            messages, self.messages = self.messages, []
            return [Shutdown()] if ended or harness.clock.now() > 60.0 else messages

        def send(self, message: FromEngine) -> None:
            ended.extend(output.request_id for output in getattr(message, "outputs", ()) if output.finish_reason)

    line = Line()
    run_engine(harness.core, READY, line, line, harness.clock)
    assert ended == ["b:0"]
