"""A simulated executor whose kernel reads shared prefixes once: its steps take less, and the scheduler knows it."""

from pathlib import Path

import msgspec
import pytest

from neaptide.engine.config import SharedReads
from neaptide.engine.observer import EngineObserver
from neaptide.engine.steps.plan import StepResult
from neaptide.engine.steps.step import Step
from neaptide.simulation.replay import Replay, replay
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from tests.simulation.scenes import COST, mixed, offline, profile

KERNEL = SharedReads(decodes_per_read=3, min_tokens=8)
SHARING = msgspec.structs.replace(profile(num_blocks=48), shared_reads=KERNEL)


class DecodeTimes(EngineObserver):
    """Seconds of the steps with three decodes and nothing else, with their context tokens."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []

    def executed(self, step: Step, result: StepResult) -> None:
        shape = step.plan.shape
        if (shape.decode_requests, shape.prefill_requests) == (3, 0):
            self.steps.append((shape.decode_context_tokens, result.model_s))


@pytest.mark.parametrize("kernel", [None, KERNEL])
def test_three_decodes_of_one_prefix_take_as_long_as_their_reads(kernel: SharedReads | None) -> None:
    """The rows have 16 tokens in common, which two of three decodes need not read."""
    times = DecodeTimes()
    scenario = Scenario(
        profile=msgspec.structs.replace(profile(), shared_reads=kernel),
        offline=[offline(*[(16, 4, 8)] * 3)],
        block_size=4,
        keep_order=True,
        refill=False,
    )
    simulate(scenario, observers=[times])
    saved_tokens = 2 * 16 if kernel else 0
    assert len(times.steps) >= 4
    for context_tokens, seconds in times.steps:
        rest_s = COST.fixed_s + 3e-4 + 3 * COST.decode_request_s
        assert seconds == pytest.approx(rest_s + COST.kv_token_s * (context_tokens - saved_tokens), rel=1e-9)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_replay_counts_the_same_reads(depth: int, tmp_path: Path) -> None:
    costs = dict.fromkeys(("prefill", "decode", "mixed"), msgspec.structs.replace(COST, kv_token_s=2e-5))
    scenario = mixed(profile=msgspec.structs.replace(SHARING, costs=costs), cost_model=None, overlap_depth=depth)
    run = simulate(scenario, step_log=tmp_path / "log")
    assert replay(tmp_path / "log") == Replay(run.result.steps, None)
    text = (tmp_path / "log").read_text()
    (tmp_path / "other").write_text(text.replace('"decodes_per_read":3', '"decodes_per_read":1'))
    assert replay(tmp_path / "other").difference is not None


def test_without_shared_prefixes_a_kernel_that_shares_changes_nothing(tmp_path: Path) -> None:
    alone = [offline(*[(0, 20, 8)] * 12)]
    for name, device in (("plain", profile(num_blocks=48)), ("sharing", SHARING)):
        simulate(mixed(profile=device, offline=alone), step_log=tmp_path / name)
    plain, sharing = ((tmp_path / name).read_text().splitlines() for name in ("plain", "sharing"))
    assert plain[1:] == sharing[1:]  # all but the header
