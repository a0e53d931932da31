"""The engine keeps nothing of requests that have ended, beside what it keeps for every block of a full cache."""

from collections import Counter
from pathlib import Path

import pytest

from neaptide.engine.messages import CancelBatch
from neaptide.engine.record.traffic_recorder import TrafficRecorder
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from tests.engine.harness import Harness, batch, flex, online
from tests.server.observe.kept import kept

NUM_BLOCKS = 64
ROUNDS = 4
WINDOWS = {
    "neaptide.engine.core.EngineCore._planning_s",
    "neaptide.engine.core.EngineCore._starting_s",
    "neaptide.engine.kv.online_returns.OnlineReturns._evicted",
    "neaptide.engine.scheduler.traffic.RecentTraffic._answers",
    "neaptide.engine.scheduler.traffic.RecentTraffic._arrivals_s",
    "neaptide.engine.scheduler.traffic.RecentTraffic._prompts",
}
"""Records of the last steps, arrivals, answers and evicted blocks, at most as many as each keeps."""


def visits(harness: Harness, recorder: TrafficRecorder, directory: Path, number: int) -> None:
    """Chats, a batch that is worked off and one that is cancelled, of tokens that no other round has."""
    prompts = [[1000 * number + 20 * k + i for i in range(12)] for k in range(12)]
    for k, prompt in enumerate(prompts[:6]):
        harness.core.handle((flex if k % 2 else online)(f"r{number}-{k}", prompt))
    harness.core.handle(batch(directory, f"worked-off-{number}", prompts[6:9]))
    harness.core.handle(batch(directory, f"cancelled-{number}", prompts[9:]))
    harness.step()
    harness.core.handle(CancelBatch(f"cancelled-{number}"))
    harness.run()
    assert recorder.take(1e6 * (number + 1))


@pytest.mark.parametrize("policy", ["neaptide", "priority"])
def test_requests_leave_nothing_behind_once_the_cache_is_full(tmp_path: Path, policy: str) -> None:
    harness = Harness(NUM_BLOCKS, policy=policy)
    recorder = TrafficRecorder(harness.core.scheduler, NUM_BLOCKS, lambda: ({}, ConstantCostModel(0.01)))
    harness.core.subscribe(recorder)

    def found() -> Counter[str]:
        harness.watch.log.clear()  # the test's own
        return Counter({name: count for name, count in kept(harness.core, recorder).items() if name not in WINDOWS})

    for number in range(ROUNDS):
        visits(harness, recorder, tmp_path, number)
    before = found()
    for number in range(ROUNDS, 2 * ROUNDS):
        visits(harness, recorder, tmp_path, number)
    after = found()
    grown = {name: (before[name], count) for name, count in after.items() if count > before[name]}
    assert grown == {}
    assert before["neaptide.engine.kv.prefix_index.PrefixIndex._block_by_hash"] > 0.8 * NUM_BLOCKS
