"""Batch work beside recorded chats makes steps that the record has never seen. Their time is foretold all the same.

The truth is a curve of matrix products: reading the weights hides the arithmetic of few tokens, or adds to it. Chats
are recorded alone, with few streams. Then inferred and true costs are simulated beside the same batch work.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from neaptide.estimator.cost.step_cost import StepCost, gemm_knot
from neaptide.estimator.device_profile import DeviceProfile
from neaptide.loadgen.workloads.made_load import Arrivals, Lengths, made_load
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.observation.forecast import batch_of
from neaptide.observation.step_times import EngineLimits, fit_step_times
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from tests.observation.pretended import Pretender, recorded
from tests.simulation.scenes import profile

NUM_BLOCKS, BLOCK_SIZE, STEP_TOKENS = 4000, 16, 512
TPOT_S = 0.25
BATCH_S = 60.0
"""Time of the record for which batch work is simulated."""
MOST_STREAMS = 7.0
"""The chats' own; batch work makes it ``Scenario``'s 64."""


def truth(
    weights_s: float, token_s: float, sharpness: float, prompts_s: float = 0.0, kv_token_s: float = 1e-6
) -> dict[str, StepCost]:
    """A step that waits for the weights and for the arithmetic: their sum if ``sharpness`` is 1, the longer if it is
    large. A step with prompts takes ``prompts_s`` more."""
    curve = [(weights_s**sharpness + (token_s * gemm_knot(k)) ** sharpness) ** (1 / sharpness) for k in range(24)]
    cost = StepCost(fixed_s=0.02, gemm_curve_s=tuple(curve), pair_s=2e-7, kv_token_s=kv_token_s, decode_request_s=5e-5)
    with_prompts = msgspec.structs.replace(cost, fixed_s=cost.fixed_s + prompts_s)
    return {"decode": cost, "prefill": with_prompts, "mixed": with_prompts}


TRUTHS = {
    "weights-bound": truth(0.1, 2e-3, 32.0),
    "compute-bound": truth(0.01, 2e-3, 32.0),
    "rounded": truth(0.08, 2e-3, 3.0),
    "slow memory": truth(0.03, 1e-3, 1.0, kv_token_s=2e-5),
    "prompts cost more": truth(0.05, 2e-3, 1.0, prompts_s=0.1),
}


def device(costs: dict[str, StepCost]) -> DeviceProfile:
    return msgspec.structs.replace(profile(NUM_BLOCKS, BLOCK_SIZE), costs=costs)


def scenario(costs: dict[str, StepCost], chats: list[TraceRequest], **fields: object) -> Scenario:
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": STEP_TOKENS, "block_size": BLOCK_SIZE}
    return Scenario(profile=device(costs), online=chats, with_bounds=False, **limits, **fields)  # type: ignore[arg-type]


def batch_tokens_per_s(costs: dict[str, StepCost], chats: list[TraceRequest]) -> float:
    batch = batch_of("lines", [(256, 64)] * 256)
    first = [chat for chat in chats if chat.arrival_s < BATCH_S]
    beside = scenario(costs, first, offline=(batch,), ttft_slo_s=5 * TPOT_S, tpot_slo_s=TPOT_S)
    return simulate(beside).result.offline_tokens_per_s


@pytest.mark.parametrize("name", TRUTHS)
def test_batch_tokens_are_foretold_within_a_tenth_from_chats_alone(name: str) -> None:
    costs = TRUTHS[name]
    chats = made_load(
        Arrivals(0.4, 400.0), Lengths.parse("lognormal:140:100"), Lengths.parse("lognormal:24:15"), seed=7
    )
    pretender = Pretender(NUM_BLOCKS, BLOCK_SIZE, every_s=1.0)
    simulate(scenario(costs, chats, policy="fcfs"), observers=[pretender])
    with TemporaryDirectory() as directory:
        record = recorded(pretender, Path(directory, "record.jsonl")).record
    found = fit_step_times(record, EngineLimits(STEP_TOKENS, NUM_BLOCKS * BLOCK_SIZE), num_draws=0, seed=0)
    assert found.most_streams < MOST_STREAMS
    assert batch_tokens_per_s(found.step_costs(), chats) == pytest.approx(batch_tokens_per_s(costs, chats), rel=0.1)
