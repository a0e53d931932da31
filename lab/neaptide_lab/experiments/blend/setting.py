"""What BlendServe's figures have in common: traces, device, orders, sizes."""

from neaptide.engine.offline.planning.plan import PromptPool
from neaptide.estimator.device_profile import DeviceProfile, load_profile
from neaptide.loadgen.workloads.blend_sets import TRACE_TARGETS
from neaptide.loadgen.workloads.offline_sets import OfflineSet, load_offline
from neaptide.simulation.pools.planned import pool_of
from neaptide_lab.experiments.blend.pools import Mix, Size
from neaptide_lab.experiments.blend.runs import OVERLAP_KAPPA, BlendCase

PROFILE = "a100-80g-llama-3.1-8b"
TRACES = (1, 2, 3, 4)
FULL = Size(shrink=16, lasting=2.1)
QUICK = Size(shrink=32, lasting=2.1)


def trace(number: int, num_requests: int) -> OfflineSet:
    """As large as it is asked for, not shrunk: for what is planned and not run."""
    return load_offline(f"blend-trace-{number}", seed=0, limit=num_requests)


def profile() -> DeviceProfile:
    return load_profile(PROFILE)


def pool_with_true_lengths(set_: OfflineSet) -> PromptPool:
    return pool_of(set_.requests, profile())


def trace_case(number: int, size: Size, overlap_kappa: float = OVERLAP_KAPPA) -> BlendCase:
    """One of the paper's traces, to be run."""
    return BlendCase.of(Mix(*TRACE_TARGETS[number]), size, profile(), overlap_kappa)
