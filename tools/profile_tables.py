"""Writes the table of the CPU profiles in ``lab/notebook/cost-model.md`` from the profiles that come with the package:

    neaptide calibrate --model DIR --out neaptide/data/profiles/cpu-111m.json && python -m tools.profile_tables

A test compares the table with the profiles.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from neaptide.estimator.calibration.report import LEAST_BOUND, NOISE_FACTOR
from neaptide.estimator.device_profile import DeviceProfile, Measurement, load_profile
from tools.pages import with_part

PAGE = Path(__file__).parents[1] / "lab" / "notebook" / "cost-model.md"
NAMES = ("cpu-neaptide-tiny", "cpu-111m")
REGIMES = ("prefill", "decode", "mixed")
OURS = "ours"
RIVALS = {"echo_max": "Echo (constant as a floor)", "echo_sum": "Echo (constant added)", "bros": "BROS"}
RIVALS |= {"hygen": "HyGen-style"}
BEGIN, END = "| mean relative error on held-out shapes", "\n\n"
"""Begin and end of the table."""


def table(profiles: Sequence[DeviceProfile]) -> str:
    """The table with a column for each profile, without its last line end.

    Args:
        profiles: measured ones.
    """
    columns = [_column(profile) for profile in profiles]
    heads = [f"`{profile.name}`" for profile in profiles]
    lines = [_line([f"{BEGIN}, prefill / decode / mixed".removeprefix("| "), *heads]), "|" + "---|" * (len(heads) + 1)]
    return "\n".join([*lines, *(_line([name, *(column[name] for column in columns)]) for name in columns[0])])


def _column(profile: DeviceProfile) -> dict[str, str]:
    """Row -> text of the cell."""
    measured, errors, noise = profile.measurement, profile.held_out_mape, profile.noise_floor
    assert measured is not None
    bounds = {regime: max(LEAST_BOUND, NOISE_FACTOR * noise[regime]) for regime in noise}
    threads = f"{measured.num_threads} thread" + "s" * (measured.num_threads > 1)
    column = {
        "measured": f"{profile.date}, {profile.device}, {profile.dtype}, {threads}",
        "steps; repeats of each": f"{measured.num_steps:,}; {' / '.join(str(measured.repeats[r]) for r in REGIMES)}",
        "the machine's speed drifted by": f"{measured.drift:.0%}" + ", divided out" * measured.is_normalised,
    }
    column |= {name: _percent(errors[key]) for key, name in RIVALS.items()}
    column |= {OURS: _percent(errors[OURS]), "noise floor": _percent(noise), "bound": _percent(bounds)}
    column["ours is within the bound"] = _each(errors[OURS][r] <= bounds[r] for r in REGIMES)
    column["ours is the lowest"] = _each(errors[OURS][r] == min(each[r] for each in errors.values()) for r in REGIMES)
    return column | _as_measured(measured)


def _as_measured(measured: Measurement) -> dict[str, str]:
    return {
        "ours, times not divided": _percent(measured.raw_held_out_mape[OURS]),
        "noise floor, times not divided": _percent(measured.raw_noise_floor),
    }


def _percent(by_regime: Mapping[str, float]) -> str:
    return " / ".join(f"{100 * by_regime[regime]:.1f}" for regime in REGIMES) + "%"


def _each(answers: Iterable[bool]) -> str:
    return " / ".join("yes" if answer else "**no**" for answer in answers)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_part(page, BEGIN, END, table([load_profile(name) for name in NAMES])), encoding="utf-8")


if __name__ == "__main__":
    main()
