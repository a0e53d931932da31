"""The line about the work of the last ten seconds."""

from neaptide.engine.messages import Occupancy
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.engine_client.engine_state import EngineState
from neaptide.server.observe.history import History, Interval, Targets, bucket_of
from neaptide.server.observe.work_log import WorkLog, work_line
from tests.server.fake_engine import some_stats

BUSY = Occupancy(3, 60, 1, 540, 40, 20, 10, 30, 12)


def test_it_says_throughput_requests_memory_and_targets() -> None:
    work = Interval(
        start_s=0,
        online_tokens=1200,
        offline_tokens=16_360,
        targets={"default": Targets(9, 1, 10, 0)},
        ttft={bucket_of(0.1): 9, bucket_of(0.3): 1},
        outcomes={"ok": 10},
    )
    assert work_line(work, 10.0, BUSY) == (
        "120 online + 1636 offline tokens/s; running 3 + 60; waiting 1 + 540; KV 40%; "
        "met TTFT 90%, TPOT 100% of 10 (TTFT p99 306 ms)"
    )


def test_batch_work_alone_has_no_targets() -> None:
    line = work_line(Interval(start_s=0, offline_tokens=100), 10.0, BUSY)
    assert line == "0 online + 10 offline tokens/s; running 3 + 60; waiting 1 + 540; KV 40%"


def test_an_idle_server_says_nothing() -> None:
    assert work_line(Interval(start_s=0), 10.0, BUSY) is None


def test_each_interval_is_told_once() -> None:
    now_s, said = 1000.0, list[str]()
    history = History(lambda: now_s)
    log = WorkLog(history, EngineState(EngineClient(), lambda: 0.0), said.append)
    history.on_step(some_stats(online_decode_tokens=50))
    now_s = 1010.0
    history.on_step(some_stats(online_decode_tokens=7))  # not over
    log.look()
    log.look()
    assert [line.split(" online")[0] for line in said] == ["5"]
