"""The set-up of BROS's evaluation (arXiv 2504.09590, section 7.1), and what a run of it gives."""

from dataclasses import dataclass

from neaptide.estimator.device_profile import load_profile
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.loadgen.workloads.online_sets import online_requests
from neaptide.simulation.result import SimResult
from neaptide.simulation.scenario import Scenario
from neaptide_lab.experiments.bros.work import WindowWork

TTFT_SLO_S, TPOT_SLO_S = 0.4, 0.2
OFFLINE = "bros-be"
DRAIN_S = 3600.0
"""Time after the last arrival, so that a policy that is late can still end all requests for the normalized latency."""
OURS, VLLM, VLLM_V0, ROUND_ROBIN, BROS = "neaptide", "fcfs", "fcfs-v0", "round-robin", "bros"
POLICIES = (OURS, BROS, ROUND_ROBIN, VLLM, VLLM_V0)
"""In every table."""
ALONE = "neaptide alone"
"""The name of our run without offline work."""
BATCH_SIZES = (16, 32, 64)
"""Initial sizes of ``bros``: the paper's is lost, so the best of these stands for it, in every cell anew."""


@dataclass(slots=True, frozen=True)
class ServedModel:
    name: str
    profile: str
    context_tokens: int
    """The model's context; ``fcfs-v0`` also computes up to this many prompt tokens in a step."""


OPT_13B = ServedModel("OPT-13B", "a100-40g-sxm-opt-13b-tp2", 2048)
OPT_30B = ServedModel("OPT-30B", "a100-40g-sxm-opt-30b-tp4", 2048)
LLAMA_3_70B = ServedModel("Llama-3-70B", "a100-80g-llama-3-70b-tp8", 8192)
MODELS = (OPT_13B, OPT_30B, LLAMA_3_70B)
LENGTHS = {"ShareGPT": "bros-rt-sharegpt", "LMSYS": "bros-rt-lmsys"}


@dataclass(slots=True, frozen=True)
class Cell:
    """A load on a model."""

    model: ServedModel
    lengths: str
    """A key of ``LENGTHS``."""
    rate_rps: float

    def __str__(self) -> str:
        return f"{self.model.name}, {self.lengths} at {self.rate_rps:g}/s"


@dataclass(slots=True, frozen=True)
class Size:
    """How much is run."""

    models: tuple[ServedModel, ...]
    rates_rps: tuple[float, ...]
    window_s: float
    """Part of the paper's ten minutes."""
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    lengths: tuple[str, ...] = tuple(LENGTHS)
    only: tuple[str, ...] = ()
    """Runs only cells whose names contain one of these; all if empty."""

    def cells(self) -> list[Cell]:
        every = [Cell(m, lengths, rate) for lengths in self.lengths for m in self.models for rate in self.rates_rps]
        return [cell for cell in every if not self.only or any(part in str(cell) for part in self.only)]


FULL = Size(MODELS, (3.0, 6.0, 9.0, 12.0, 15.0), 240.0)
"""The paper has 15 cases of a model and a rate for each set of lengths; its rates are lost but for the last."""


@dataclass(slots=True, frozen=True)
class Outcome:
    """One run."""

    result: SimResult
    work: WindowWork
    num_unfinished: int
    step_s: float
    """Mean time of a step, planning apart."""
    planning_s: float
    """Mean processor time of planning one, on this machine."""
    gaps: str
    """See ``OfflineGaps``."""

    @property
    def latency_s(self) -> float:
        """Normalized: seconds per output token."""
        return self.result.online.normalized_latency_s or 0.0

    @property
    def offline_tokens_per_s(self) -> float:
        return self.result.offline_tokens_per_s

    def attained(self, target: str) -> float:
        return self.result.online.attainment[target] or 0.0


Outcomes = dict[str, Outcome]
"""By policy, or ``ALONE``."""


@dataclass(slots=True, frozen=True)
class CellRuns:
    by_policy: Outcomes
    bros_by_size: dict[int, Outcome]
    """By initial batch size; the best of them is in ``by_policy`` too."""

    @property
    def bros_size(self) -> int:
        return next(initial for initial, one in self.bros_by_size.items() if one is self.by_policy[BROS])


Runs = dict[Cell, CellRuns]


def scenario(cell: Cell, window_s: float, *, seed: int = 0) -> Scenario:
    """The load with offline work."""
    return Scenario(
        profile=load_profile(cell.model.profile),
        online=online_requests(f"{LENGTHS[cell.lengths]}@{cell.rate_rps:g}", seed, window_s=(0.0, window_s)),
        offline=[load_offline(OFFLINE, seed)],
        ttft_slo_s=TTFT_SLO_S,
        tpot_slo_s=TPOT_SLO_S,
        max_model_len=cell.model.context_tokens,
        drain_s=DRAIN_S,
        seed=seed,
    )
