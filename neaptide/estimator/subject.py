"""The subject of a device profile, and the check whether a profile fits."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from neaptide import __version__
from neaptide.engine.config import SharedReads
from neaptide.estimator.calibration.micro_runs import Parts
from neaptide.estimator.calibration.steps import CalibrationLimits
from neaptide.estimator.cost.iteration_time import Regime
from neaptide.estimator.cost.step_cost import StepCost
from neaptide.estimator.device_profile import SLOW_CORE, DeviceProfile
from neaptide.executors.contract import ProfiledExecutor


@dataclass(slots=True, frozen=True)
class Subject:
    """A model on a device: the subject of a profile."""

    model: str
    model_fingerprint: str
    """Empty if unknown; then no profile is saved."""
    device: str
    dtype: str
    num_threads: int
    kv_bytes_per_token: int
    num_blocks: int
    block_size: int
    build: str = ""
    """See ``ProfiledExecutor.build``."""
    shared_reads: SharedReads | None = None

    @classmethod
    def of(
        cls,
        executor: ProfiledExecutor,
        model: str,
        block_size: int,
        model_fingerprint: str = "",
        shared_reads: SharedReads | None = None,
    ) -> "Subject":
        return cls(
            model,
            model_fingerprint,
            executor.device_name,
            executor.dtype_name,
            executor.num_threads,
            executor.kv_bytes_per_token,
            executor.num_blocks,
            block_size,
            executor.build,
            shared_reads,
        )

    def file_name(self, limits: CalibrationLimits, steps: Sequence[Parts]) -> str:
        """File name of the saved profile. It differs wherever step times, or the start-up steps, may differ.

        The number of blocks counts only as far as it decides which steps there are.
        """
        parts = (
            __version__,
            self.model_fingerprint,
            self.device,
            self.dtype,
            self.num_threads,
            self.block_size,
            limits.max_batched_tokens,
            limits.max_seqs,
            limits.max_model_len,
            steps,
            *([self.build] if self.build else []),
        )
        digest = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
        return f"{digest[:24]}.json"

    def profile(self, name: str, date: str, costs: Mapping[Regime, StepCost], commit: str = "") -> DeviceProfile:
        """A measured profile, without its errors."""
        return DeviceProfile(
            name=name,
            source="measured",
            device=self.device,
            model=self.model,
            dtype=self.dtype,
            date=date,
            commit=commit,
            kv_bytes_per_token=self.kv_bytes_per_token,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            build=self.build,
            shared_reads=self.shared_reads,
            planning=SLOW_CORE,
            costs={regime.value: cost for regime, cost in costs.items()},
        )


def check_profile(profile: DeviceProfile, subject: Subject) -> list[str]:
    """How the subject differs from the profile, one phrase each. Step times may then differ.

    Raises:
        ValueError: the profile is of another model.
    """
    if profile.kv_bytes_per_token != subject.kv_bytes_per_token:
        raise ValueError(
            f"profile {profile.name} is of {profile.model} in {profile.dtype}, {profile.kv_bytes_per_token} bytes of "
            f"KV per token; {subject.model} in {subject.dtype} has {subject.kv_bytes_per_token}: not the same model"
        )
    pairs = (
        ("model", profile.model, subject.model),
        ("device", profile.device, subject.device),
        ("dtype", profile.dtype, subject.dtype),
        ("build", profile.build, subject.build),
    )
    differing = [f"{what} {theirs!r}, here {ours!r}" for what, theirs, ours in pairs if theirs != ours]
    measurement = profile.measurement
    if measurement is not None and measurement.num_threads != subject.num_threads:
        differing.append(f"{measurement.num_threads} threads, here {subject.num_threads}")
    return differing
