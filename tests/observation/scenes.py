"""A server whose step times are known, under Poisson chats. Steps are long, so that few have to be simulated."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from neaptide.estimator.cost.step_cost import StepCost
from neaptide.estimator.device_profile import DeviceProfile
from neaptide.loadgen.workloads.made_load import Arrivals, Lengths, made_load
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from tests.observation.pretended import Pretender, Recorded, recorded
from tests.simulation.scenes import profile

COST = StepCost(
    fixed_s=0.12, gemm_curve_s=(1e-3, 2e-3), pair_s=0.0, kv_token_s=2e-5, decode_request_s=2e-3, prefill_request_s=0.0
)
NUM_BLOCKS, BLOCK_SIZE = 1000, 16
STEP_TOKENS = 256


def device() -> DeviceProfile:
    whole = profile(NUM_BLOCKS, BLOCK_SIZE)
    return msgspec.structs.replace(whole, costs=dict.fromkeys(("prefill", "decode", "mixed"), COST))


@cache
def watched() -> Recorded:
    """The record of 160 s, with 0.7 chats a second."""
    chats = made_load(Arrivals(0.7, 160.0), Lengths.parse("lognormal:90:60"), Lengths.parse("lognormal:24:15"), seed=1)
    scenario = Scenario(
        profile=device(),
        online=chats,
        policy="fcfs",
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=32,
        with_bounds=False,
    )
    pretender = Pretender(NUM_BLOCKS, BLOCK_SIZE)
    simulate(scenario, observers=[pretender])
    with TemporaryDirectory() as directory:
        return recorded(pretender, Path(directory, "record.jsonl"))
