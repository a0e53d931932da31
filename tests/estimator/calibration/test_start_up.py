"""The cost model that an engine starts with: given, kept from an earlier start, or measured."""

import itertools
import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from neaptide.engine.clock import VirtualClock
from neaptide.estimator.calibration.micro_runs import MicroRunner, shape_of
from neaptide.estimator.calibration.start_up import MAX_STEP_S, MAX_TOTAL_S, ROUNDS, WARM_UP_S, StartUp
from neaptide.estimator.calibration.steps import CalibrationLimits, start_steps
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.device_profile import load_profile, save_profile
from neaptide.estimator.subject import Subject, check_profile
from tests.estimator.machine_executor import SAME_EVERYWHERE, MachineExecutor

LIMITS = CalibrationLimits(max_batched_tokens=2048, max_seqs=256, max_model_len=8192, kv_tokens=2048 * 16)
STEPS = start_steps(LIMITS)
TRUTH = RooflineModel(SAME_EVERYWHERE)


def start(
    kept_in: Path | None,
    profile: str | None = None,
    *,
    fingerprint: str = "f",
    slow: float | Callable[[], float] = 1.0,
    num_blocks: int = 2048,
    limits: CalibrationLimits = LIMITS,
) -> tuple[OnlineCostModel, MachineExecutor]:
    clock = VirtualClock()
    executor = MachineExecutor(clock, num_blocks, slow=slow if callable(slow) else lambda: slow)
    subject = Subject.of(executor, "tiny", 16, fingerprint)
    start_up = StartUp(MicroRunner(executor, clock, 16), clock, limits, subject, "2026-01-01", kept_in)
    return start_up.cost_model(profile), executor


def write_profile(path: Path, **changes: object) -> Path:
    subject = Subject.of(MachineExecutor(VirtualClock()), "tiny", 16, "f")
    save_profile(replace(subject, **changes).profile(path.stem, "2026-01-01", SAME_EVERYWHERE), path)  # type: ignore[arg-type]
    return path


def error_of(model: OnlineCostModel, slow: float = 1.0) -> float:
    """Over steps that were not measured."""
    steps = [((100, 0),), ((1, 300),) * 20, ((48, 100), *((1, 200),) * 12)]
    wanted = [slow * TRUTH.predict(shape_of(parts)).seconds for parts in steps]
    found = [model.predict(shape_of(parts)).seconds for parts in steps]
    return max(abs(x / y - 1.0) for x, y in zip(found, wanted, strict=True))


def test_the_first_start_measures_and_keeps_a_profile(tmp_path: Path) -> None:
    model, executor = start(tmp_path / "profiles")
    assert executor.steps == ROUNDS * len(STEPS)
    assert error_of(model) < 0.02
    (file,) = (tmp_path / "profiles").iterdir()
    assert load_profile(file).model == "tiny"


def test_a_kept_profile_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        start(tmp_path)
    finally:
        os.umask(before)
    (kept,) = tmp_path.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600


def test_a_later_start_only_warms_up(tmp_path: Path) -> None:
    start(tmp_path)
    model, executor = start(tmp_path)
    assert executor.steps == len(STEPS)
    assert executor.known_requests == frozenset()
    assert error_of(model) < 0.02
    assert len(list(tmp_path.iterdir())) == 1


def test_a_later_start_notices_that_the_machine_has_become_slower(tmp_path: Path) -> None:
    start(tmp_path)
    model, _ = start(tmp_path, slow=1.5)
    assert error_of(model, slow=1.5) < 0.05


def test_another_model_under_the_same_name_is_measured_anew(tmp_path: Path) -> None:
    start(tmp_path)
    _, executor = start(tmp_path, fingerprint="g")
    assert executor.steps == ROUNDS * len(STEPS)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_fingerprint": "g"},
        {"device": "other"},
        {"dtype": "bfloat16"},
        {"num_threads": 2},
        {"block_size": 32},
        {"build": "vllm 0.32.0 V1 enforce_eager=true"},
    ],
)
def test_a_profile_is_kept_for_each_thing_that_decides_over_step_times(changes: dict[str, object]) -> None:
    subject = Subject.of(MachineExecutor(VirtualClock()), "tiny", 16, "f")
    other = replace(subject, **changes)  # type: ignore[arg-type]
    assert other.file_name(LIMITS, STEPS) != subject.file_name(LIMITS, STEPS)
    more_blocks = replace(subject, num_blocks=4096).file_name(replace(LIMITS, kv_tokens=4096 * 16), STEPS)
    assert more_blocks == subject.file_name(LIMITS, STEPS)


@pytest.mark.parametrize("changes", [{"max_batched_tokens": 64}, {"max_seqs": 16}, {"max_model_len": 512}])
def test_a_profile_is_kept_for_the_limits_it_was_measured_under(tmp_path: Path, changes: dict[str, int]) -> None:
    start(tmp_path, limits=replace(LIMITS, **changes))
    model, executor = start(tmp_path)
    assert executor.steps == ROUNDS * len(STEPS)
    assert error_of(model) < 0.02
    assert len(list(tmp_path.iterdir())) == 2


def test_a_small_cache_is_measured_apart(tmp_path: Path) -> None:
    start(tmp_path, num_blocks=40)
    _, executor = start(tmp_path)
    assert executor.steps == ROUNDS * len(STEPS)


def test_a_first_start_that_ran_out_of_time_is_not_kept(tmp_path: Path) -> None:
    start(tmp_path, slow=60.0)
    assert list(tmp_path.iterdir()) == []
    model, executor = start(tmp_path)
    assert executor.steps == ROUNDS * len(STEPS)
    assert error_of(model) < 0.02
    assert len(list(tmp_path.iterdir())) == 1


def damage(text: str, kind: str) -> str:
    profile = json.loads(text)
    mixed = profile["costs"]["mixed"]
    if kind == "no regime":
        del profile["costs"]["mixed"]
    elif kind == "short curve":
        mixed["gemm_curve_s"] = [1.0]
    elif kind == "negative":
        mixed["fixed_s"] = -5.0
    elif kind == "zero":
        profile["costs"]["mixed"] = {"fixed_s": 0.0, "gemm_curve_s": [0.0, 0.0], "pair_s": 0.0, "kv_token_s": 0.0}
    else:
        return "{"
    return json.dumps(profile)


DAMAGES = ["cut off", "no regime", "short curve", "negative", "zero"]


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_kept_profile_that_is_damaged_is_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    start(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(damage(file.read_text(), kind))
    _, executor = start(tmp_path)
    assert executor.steps == ROUNDS * len(STEPS)
    assert "cannot be used" in caplog.text
    assert load_profile(file).model == "tiny"


def test_a_directory_that_cannot_be_written_does_not_stop_a_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    model, _ = start(tmp_path / "file")
    assert error_of(model) < 0.02
    assert "cannot be saved" in caplog.text


@pytest.mark.parametrize(("kept_in", "fingerprint"), [(False, "f"), (True, "")])
def test_nothing_is_kept_without_a_directory_or_a_fingerprint(tmp_path: Path, kept_in: bool, fingerprint: str) -> None:
    start(tmp_path if kept_in else None, fingerprint=fingerprint)
    assert list(tmp_path.iterdir()) == []


def test_a_given_profile_is_taken_and_nothing_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profile = write_profile(tmp_path / "given.json")
    model, executor = start(tmp_path / "kept", str(profile))
    assert executor.steps == len(STEPS)
    assert error_of(model) < 0.02
    assert not (tmp_path / "kept").exists()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "other.json", kv_bytes_per_token=4096, model="big")
    with pytest.raises(ValueError, match=r"other is of big in float32, 4096 bytes of KV per token; tiny .* has 1024"):
        start(None, str(profile))


def test_a_profile_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no profile 'nonsense'"):
        start(None, "nonsense")


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_given_profile_that_is_damaged_is_refused(tmp_path: Path, kind: str) -> None:
    profile = write_profile(tmp_path / "given.json")
    profile.write_text(damage(profile.read_text(), kind))
    with pytest.raises(ValueError, match=r"given\.json is not a device profile"):
        start(None, str(profile))


def test_a_profile_of_another_device_is_taken_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profile = write_profile(tmp_path / "given.json", device="a faster machine")
    model, _ = start(None, str(profile), slow=2.0)
    assert "device 'a faster machine', here 'a machine'" in caplog.text
    assert error_of(model, slow=2.0) < 0.1


def test_a_profile_that_fits_differs_in_nothing(tmp_path: Path) -> None:
    subject = Subject.of(MachineExecutor(VirtualClock()), "tiny", 16, "f")
    assert check_profile(load_profile(write_profile(tmp_path / "given.json")), subject) == []


def test_a_profile_of_another_size_of_kv_is_of_another_model(tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "given.json", kv_bytes_per_token=2048)
    with pytest.raises(ValueError, match="2048 bytes of KV per token; tiny in float32 has 1024: not the same model"):
        start(None, str(profile))


def test_a_slow_machine_is_not_measured_for_long(tmp_path: Path) -> None:
    model, executor = start(tmp_path, slow=60.0)
    assert executor.clock.now() <= MAX_TOTAL_S + 2 * MAX_STEP_S
    assert executor.steps < ROUNDS * len(STEPS)
    assert error_of(model, slow=60.0) < 0.1


def test_a_machine_that_became_slow_is_not_warmed_up_for_long(tmp_path: Path) -> None:
    start(tmp_path)
    _, executor = start(tmp_path, slow=60.0)
    assert 0 < executor.steps < len(STEPS)
    assert executor.clock.now() <= WARM_UP_S + MAX_STEP_S


def test_steps_that_do_not_fit_into_the_cache_are_left_out() -> None:
    _, executor = start(None, num_blocks=40)
    assert 0 < executor.steps < ROUNDS * len(STEPS)


def test_with_nothing_measured_the_first_guess_stays(tmp_path: Path) -> None:
    model, executor = start(tmp_path, num_blocks=0)
    assert executor.steps == 0
    shape = shape_of(((100, 0),))
    assert model.predict(shape).seconds == pytest.approx(RooflineModel.generic().predict(shape).seconds)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_stalled_does_not_count() -> None:
    stalls = itertools.cycle([1.0, 1.0, 3.0, 1.0, 1.0])
    assert len(STEPS) % 5  # so no step stalls in two rounds
    model, _ = start(None, slow=lambda: next(stalls))
    errors = [model.base.predict(shape_of(p)).seconds / TRUTH.predict(shape_of(p)).seconds - 1.0 for p in STEPS]
    assert max(map(abs, errors)) < 0.02
