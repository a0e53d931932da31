"""Device profiles: costs of a step on a named device with a named model, and the size of the KV cache."""

from importlib.resources import files
from pathlib import Path
from typing import Literal

import msgspec

from neaptide.engine.config import SharedReads
from neaptide.estimator.cost.iteration_time import Regime
from neaptide.estimator.cost.step_cost import StepCost

MAX_COST_S = 3600.0
"""Upper bound of a plausible coefficient."""
COUNTS = ("kv_bytes_per_token", "num_blocks", "block_size", "tensor_parallel", "tile_tokens")
"""Profile fields that must be at least 1."""


class Efficiencies(msgspec.Struct, frozen=True):
    """Fractions of the device's limits that kernels are assumed to reach."""

    gemm: float
    attention: float
    bandwidth: float
    link: float
    """Efficiency of links between devices."""


class PlanningCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Host time to plan a step and process its results, in seconds; equal for all policies."""

    fixed_s: float = 0.0
    running_request_s: float = 0.0
    """For each request that holds KV."""
    pooled_row_s: float = 0.0
    """For each row that an offline plan orders, in a separate process: tree and BlendServe's order."""

    def seconds(self, num_running: int) -> float:
        return self.fixed_s + self.running_request_s * num_running


SLOW_CORE = PlanningCost(7.5e-4, 5.5e-7, 2.6e-5)
"""Offline plans: 10.3 s for 400,000 rows of 250 tokens (``neaptide experiment planning-time``, a busy core).

Steps: ``benchmarks.scheduling`` on one shared 2.5 GHz core measured 0.8 ms at 125 running requests and 1.3 ms at 1,000,
for any number of waiting rows (lab/notebook/README.md). Calibration does not measure it, so every measured profile has
these figures.
"""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """How a profile was measured."""

    num_threads: int
    """Compute threads on a CPU; 0 on a GPU."""
    num_shapes: int
    num_steps: int
    left_out: dict[str, int]
    """Reason for skipping shapes -> number of shapes."""
    drift: float
    """Drift of the machine's speed during the measurement: (q90 - q10) / median of the reference step's rolling
    time."""
    is_normalised: bool
    """Whether times, errors and noise floor are divided by the machine's speed at that moment."""
    repeats: dict[str, int] = {}
    """By regime, the median number of runs of steps that ran more than once. 0 means that the noise floor is
    unknown."""
    grid_mape: dict[str, dict[str, float]] = {}
    """``held_out_mape`` on steps of the grid only."""
    ragged_mape: dict[str, dict[str, float]] = {}
    """``held_out_mape`` on ragged steps only."""
    raw_noise_floor: dict[str, float]
    """``noise_floor`` of the raw times."""
    raw_held_out_mape: dict[str, dict[str, float]]
    """``held_out_mape`` of models fitted to the raw times."""


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device with a model on it.

    ``analytic`` profiles are computed from stated limits and efficiencies; ``measured`` ones come from ``neaptide
    calibrate``.
    """

    name: str
    source: Literal["analytic", "measured"]
    device: str
    model: str
    dtype: str
    date: str
    """ISO date of the measurement, or of the limits."""
    commit: str
    """Commit of the measured code; empty for analytic profiles."""
    kv_bytes_per_token: int
    """Keys and values of all layers, over all devices."""
    num_blocks: int
    """Number of KV blocks that fit."""
    block_size: int = 16
    build: str = ""
    """Other software that step times depend on: its version and arguments; empty for our own executor."""
    tensor_parallel: int = 1
    tile_tokens: int = 1
    """Tile size of the matrix products: a step takes as long as one with the next multiple of this many tokens.

    1 if the cost curve already includes this. Calibration does not measure it.
    """
    shared_reads: SharedReads | None = None
    """Prefixes that the attention kernel reads once for several requests; None if every request reads its own."""
    overlaps_copies: bool = False
    """Whether copies of single KV slots to and from host memory run while a step computes, so that only the time beyond
    it counts. Our executors save beside the step, but no GPU has measured what that hides."""
    planning: PlanningCost = PlanningCost()
    efficiencies: Efficiencies | None = None
    """Only in analytic profiles."""
    costs: dict[str, StepCost]
    """By regime: prefill, decode, mixed."""
    noise_floor: dict[str, float] = {}
    """Only in measured profiles, by regime: median relative deviation of a single time from the true one."""
    held_out_mape: dict[str, dict[str, float]] = {}
    """Only in measured profiles: model -> regime -> mean relative error on held-out shapes, each at its median time."""
    measurement: Measurement | None = None
    """Only in measured profiles."""

    @property
    def kv_capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def in_blocks_of(self, block_size: int) -> "DeviceProfile":
        """The same memory in blocks of another size. The cost of copying a block scales with its size."""
        if block_size == self.block_size:
            return self
        times = block_size / self.block_size
        costs = {
            regime: msgspec.structs.replace(cost, swap_block_s=times * cost.swap_block_s)
            for regime, cost in self.costs.items()
        }
        return msgspec.structs.replace(
            self, num_blocks=self.kv_capacity_tokens // block_size, block_size=block_size, costs=costs
        )


def load_profile(name_or_path: str | Path) -> DeviceProfile:
    """Loads a profile by its name, or from a JSON file.

    Raises:
        ValueError: the profile does not exist, or the file is invalid, lacks a regime or has impossible costs.
        OSError: the file cannot be read.
    """
    from neaptide.estimator.analytic import ANALYTIC_NAMES, analytic_profile

    text = str(name_or_path)
    if text in ANALYTIC_NAMES:
        return analytic_profile(text)
    packaged = files("neaptide.data").joinpath("profiles", f"{text}.json")
    if "/" not in text and packaged.is_file():
        return _decode(packaged.read_bytes(), text)
    path = Path(name_or_path)
    if not path.is_file():
        raise ValueError(f"no profile {text!r}: it is neither a file nor one of {', '.join(profile_names())}")
    return _decode(path.read_bytes(), text)


def save_profile(profile: DeviceProfile, path: str | Path) -> None:
    """Writes the profile as JSON, for ``load_profile``."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")


def profile_names() -> list[str]:
    """Names that ``load_profile`` accepts, sorted."""
    from neaptide.estimator.analytic import ANALYTIC_NAMES

    directory = files("neaptide.data").joinpath("profiles")
    entries = directory.iterdir() if directory.is_dir() else ()
    measured = [entry.name.removesuffix(".json") for entry in entries if entry.name.endswith(".json")]
    return sorted([*ANALYTIC_NAMES, *measured])


def _decode(data: bytes, name: str) -> DeviceProfile:
    try:
        profile = msgspec.json.decode(data, type=DeviceProfile)
        for regime in Regime:
            if regime.value not in profile.costs:
                raise ValueError(f"it lacks the costs of {regime} steps")
            _check_cost(profile.costs[regime.value], regime)
        for count in COUNTS:
            if getattr(profile, count) < 1:
                raise ValueError(f"{count} is {getattr(profile, count)}, not at least 1")
        if not all(0.0 <= seconds < MAX_COST_S for seconds in msgspec.structs.astuple(profile.planning)):
            raise ValueError(f"planning takes {profile.planning}")
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"{name} is not a device profile: {error}") from error
    return profile


def _check_cost(cost: StepCost, regime: Regime) -> None:
    """Checks the costs of a regime.

    The curve may fall, because a real one may, but not at its end, where its last slope continues.

    Raises:
        ValueError: no machine can have these costs.
    """
    if len(cost.gemm_curve_s) < 2:
        raise ValueError(f"gemm_curve_s of {regime} steps needs at least the times of 1 and 2 tokens")
    if cost.gemm_curve_s[-1] < cost.gemm_curve_s[-2]:
        raise ValueError(f"gemm_curve_s of {regime} steps falls at its end")
    single = {name: seconds for name, seconds in msgspec.structs.asdict(cost).items() if name != "gemm_curve_s"}
    coefficients: dict[str, float] = single | {
        f"gemm_curve_s[{k}]": seconds for k, seconds in enumerate(cost.gemm_curve_s)
    }
    for name, seconds in coefficients.items():
        if not 0.0 <= seconds < MAX_COST_S:
            raise ValueError(f"{name} of {regime} steps is {seconds} s, not in 0..{MAX_COST_S:.0f}")
    if sum(coefficients.values()) <= 0.0:  # a prediction of 0 could not be corrected
        raise ValueError(f"{regime} steps cost nothing")
