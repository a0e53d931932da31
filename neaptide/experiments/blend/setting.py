"""What BlendServe's figures have in common: traces, device, orders."""

from neaptide.engine.offline.planning.plan import Pool
from neaptide.estimator.device_profile import DeviceProfile, load_profile
from neaptide.loadgen.workloads.offline_sets import OfflineSet, load_offline
from neaptide.simulation.pools.planned import pool_of

PROFILE = "a100-80g-llama-3.1-8b"
TRACES = (1, 2, 3, 4)


def trace(number: int, num_requests: int) -> OfflineSet:
    return load_offline(f"blend-trace-{number}", seed=0, limit=num_requests)


def profile() -> DeviceProfile:
    return load_profile(PROFILE)


def pool_with_true_lengths(set_: OfflineSet) -> Pool:
    return pool_of(set_.requests, profile())
