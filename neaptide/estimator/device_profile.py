"""Device profiles: what a step costs on a named device with a named model, and how much KV cache fits."""

from importlib.resources import files
from pathlib import Path
from typing import Literal

import msgspec

from neaptide.estimator.cost.iteration_time import Regime
from neaptide.estimator.cost.step_cost import StepCost

MAX_COST_S = 3600.0
"""No coefficient of a real machine is as large."""
COUNTS = ("kv_bytes_per_token", "num_blocks", "block_size", "tensor_parallel", "tile_tokens")
"""Fields of a profile that are at least 1."""


class Efficiencies(msgspec.Struct, frozen=True):
    """Shares of the device's limits that kernels are taken to reach."""

    gemm: float
    attention: float
    bandwidth: float
    link: float
    """Between devices."""


class PlanningCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the host takes to plan a step and to take in its results, in seconds; the same under every policy."""

    fixed_s: float = 0.0
    running_request_s: float = 0.0
    """For each request that holds KV."""
    pooled_row_s: float = 0.0
    """Beside the engine, for each row that an offline plan orders: tree and BlendServe's order."""

    def seconds(self, num_running: int) -> float:
        return self.fixed_s + self.running_request_s * num_running


SLOW_CORE = PlanningCost(7.5e-4, 5.5e-7, 2.6e-5)
"""Offline plans: 10.3 s for 400,000 rows of 250 tokens (``neaptide experiment planning-time``, a busy core). Steps:
``benchmarks.scheduling`` on one shared 2.5 GHz core: 0.8 ms at 125 running requests, 1.3 at 1,000, however many rows
wait (lab/notebook/README.md). A calibration does not measure it: every measured profile has these figures."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """How a measured profile came about, beside its errors."""

    num_threads: int
    """Compute threads on a CPU; 0 on a GPU."""
    num_shapes: int
    num_steps: int
    left_out: dict[str, int]
    """Why shapes were left out -> how many."""
    drift: float
    """Spread of the machine's speed while it was measured: (q90 - q10) / median of a reference step's rolling time."""
    is_normalised: bool
    """Whether times, errors and noise floor are divided by the machine's speed of the moment."""
    repeats: dict[str, int] = {}
    """By regime, of steps that ran more than once, in the median; 0 where none did: the noise floor is unknown."""
    grid_mape: dict[str, dict[str, float]] = {}
    """As ``held_out_mape``, of steps of the grid only ..."""
    ragged_mape: dict[str, dict[str, float]] = {}
    """... and of ragged ones."""
    raw_noise_floor: dict[str, float]
    """As ``noise_floor``, of the times as they were measured ..."""
    raw_held_out_mape: dict[str, dict[str, float]]
    """... and the errors of models fitted to those."""


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device with a model on it.

    ``analytic`` profiles are computed from stated limits and efficiencies; ``measured`` ones come from
    ``neaptide calibrate``.
    """

    name: str
    source: Literal["analytic", "measured"]
    device: str
    model: str
    dtype: str
    date: str
    """ISO date of the measurement, or of the limits."""
    commit: str
    """Of the code that was measured; empty for analytic profiles."""
    kv_bytes_per_token: int
    """Keys and values of all layers, over all devices."""
    num_blocks: int
    """KV blocks that fit."""
    block_size: int = 16
    build: str = ""
    """What else step times depend on: version and arguments of the software that computes; empty where it is ours."""
    tensor_parallel: int = 1
    tile_tokens: int = 1
    """Of its matrix products: a step takes as long as one with the next multiple of so many tokens. 1 where the curve
    of the costs tells all; no calibration measures it."""
    planning: PlanningCost = PlanningCost()
    efficiencies: Efficiencies | None = None
    """Only analytic."""
    costs: dict[str, StepCost]
    """By regime: prefill, decode, mixed."""
    noise_floor: dict[str, float] = {}
    """Only measured, by regime: median relative deviation of a single time from the true one."""
    held_out_mape: dict[str, dict[str, float]] = {}
    """Only measured: model -> regime -> mean relative error on shapes that were not fitted, each at its median time."""
    measurement: Measurement | None = None
    """Only measured."""

    @property
    def kv_capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def in_blocks_of(self, block_size: int) -> "DeviceProfile":
        """The same memory in blocks of another size, of which one takes as much longer to copy as it is larger."""
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
    """A profile by its name, or from a JSON file.

    Raises:
        ValueError: no such profile, or the file is not one, lacks a regime or holds costs that no machine has.
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
        raise ValueError(f"no profile {text!r}: not a file, and not one of {', '.join(profile_names())}")
    return _decode(path.read_bytes(), text)


def save_profile(profile: DeviceProfile, path: str | Path) -> None:
    """Writes the profile as JSON, for ``load_profile``."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")


def profile_names() -> list[str]:
    """Names that ``load_profile`` knows, sorted."""
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
                raise ValueError(f"it has no costs of {regime} steps")
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
    """A curve that falls is allowed, because a real one may, but not at its end: it goes on with its last slope.

    Raises:
        ValueError: no steps of a machine cost that.
    """
    if len(cost.gemm_curve_s) < 2:
        raise ValueError(f"gemm_curve_s of {regime} steps needs the times of 1 and 2 tokens at least")
    if cost.gemm_curve_s[-1] < cost.gemm_curve_s[-2]:
        raise ValueError(f"gemm_curve_s of {regime} steps falls at its end")
    single = {name: seconds for name, seconds in msgspec.structs.asdict(cost).items() if name != "gemm_curve_s"}
    coefficients: dict[str, float] = single | {
        f"gemm_curve_s[{k}]": seconds for k, seconds in enumerate(cost.gemm_curve_s)
    }
    for name, seconds in coefficients.items():
        if not 0.0 <= seconds < MAX_COST_S:
            raise ValueError(f"{name} of {regime} steps is {seconds} s, not in 0..{MAX_COST_S:.0f}")
    if sum(coefficients.values()) <= 0.0:  # nothing is learnt from a prediction of 0
        raise ValueError(f"{regime} steps cost nothing")
