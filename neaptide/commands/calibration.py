"""Runs a calibration and prints its report."""

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from neaptide.commands.outputs import check_writable
from neaptide.estimator.calibration.calibrate import FULL, QUICK, CalibrationPace
from neaptide.estimator.calibration.report import LABELS, OURS, CalibrationReport, Evaluation
from neaptide.estimator.calibration.times import save_times, times_path
from neaptide.estimator.cost.iteration_time import Regime
from neaptide.estimator.device_profile import save_profile
from neaptide.estimator.subject import Subject
from neaptide.launch.calibrating import calibrate_model
from neaptide.launch.serve import LaunchError, executor_arguments

BUSY_DRIFT = 0.2
"""An otherwise idle machine drifts less."""


def calibrate_to_file(args: argparse.Namespace) -> None:
    """Runs the command.

    Raises:
        OSError, ValueError, RuntimeError: calibration is not possible. The message is one line.
    """
    pace = QUICK if args.quick else FULL
    if args.budget_s is not None:
        pace = CalibrationPace(args.budget_s, pace.max_step_s, pace.max_rounds)
    out: Path = args.out
    times = times_path(out)
    check_writable(out)
    check_writable(times)
    try:
        arguments = executor_arguments(args.executor_arg)
    except LaunchError as error:
        raise ValueError(str(error)) from error
    with progress_bar() as progress:
        task = progress.add_task("loading the model", total=1.0)
        found, subject = calibrate_model(
            args.model,
            pace,
            device=args.device,
            dtype=args.dtype,
            num_threads=args.num_threads,
            executor=args.executor,
            arguments=arguments,
            seed=args.seed,
            progress=lambda share: progress.update(task, completed=share, description="measuring"),
        )
    profile = found.profile(subject, out.stem, time.strftime("%Y-%m-%d"), _commit())
    save_profile(profile, out)
    save_times(found.measurements, times)
    if args.json:
        print(json.dumps(msgspec.to_builtins(profile)))
    else:
        _show(found, subject)
        print(f"profile {profile.name} written to {out}, all measured times to {times}")


def progress_bar() -> Progress:
    """A progress bar on standard error, only on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _commit() -> str:
    """Commit of the measured code; empty outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _show(found: CalibrationReport, subject: Subject) -> None:
    console, measured = Console(), found.measurements
    console.print(
        f"{subject.model} in {subject.dtype} on {subject.device}, {subject.num_threads} threads: {len(measured.runs)} "
        f"steps of {len(measured.by_step())} shapes in {measured.seconds:.0f} s",
        highlight=False,
    )
    for reason, count in measured.left_out.items():
        if count:
            console.print(f"skipped, {reason}: {count} shapes", highlight=False)
    spread = f"the machine's speed drifted by {measured.drift:.1%} during the measurement"
    if found.is_normalised:
        console.print(f"{spread}: times are divided by its speed at that moment", highlight=False)
        console.print(error_table(found.normalised, "Mean relative error on held-out shapes, normalised"))
        console.print(error_table(found.raw, "The same for raw times, not normalised"))
    else:
        console.print(spread, highlight=False)
        console.print(error_table(found.raw, "Mean relative error on held-out shapes"))
    if warning := busy_warning(found):
        console.print(warning, highlight=False)


def busy_warning(found: CalibrationReport) -> str:
    """A warning against using this calibration; empty if there is none."""
    chosen, drift = found.chosen, found.measurements.drift
    above = [regime.value for regime in chosen.mape[OURS] if not chosen.is_within_bound(regime)]
    signs = []
    if drift > BUSY_DRIFT:
        signs.append(f"its speed drifted by {drift:.0%}")
    if above:
        signs.append(f"the error is above the bound in {', '.join(above)}")
    if not signs:
        return ""
    return f"The machine was probably busy: {' and '.join(signs)}. Repeat this when it is otherwise idle."


def error_table(evaluation: Evaluation, title: str) -> Table:
    """Models by regime, with the noise floor and whether our error is within its bound."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for regime in Regime:
        table.add_column(regime.value, justify="right")

    def row(label: str, cell: Callable[[Regime], str]) -> None:
        known = evaluation.mape[OURS]
        table.add_row(label, *(cell(regime) if regime in known else "-" for regime in Regime))

    for name, errors in evaluation.mape.items():
        chosen = " (taken)" if name == evaluation.echo else ""
        row(LABELS[name] + chosen, lambda regime, errors=errors: f"{errors[regime]:.1%}")  # type: ignore[misc]
    row("ours, grid", lambda regime: _cell(evaluation.grid_mape[OURS].get(regime)))
    row("ours, ragged", lambda regime: _cell(evaluation.ragged_mape[OURS].get(regime)))
    row("noise floor", lambda regime: f"{evaluation.noise_floor[regime]:.1%}" if evaluation.repeats[regime] else "?")
    row("from repeats", lambda regime: f"{evaluation.repeats[regime]}")
    row("bound", lambda regime: f"{evaluation.bound(regime):.1%}")
    row("ours is", lambda regime: "within" if evaluation.is_within_bound(regime) else "ABOVE")
    row("", lambda regime: "lowest" if evaluation.is_lowest(regime) else "NOT LOWEST")
    return table


def _cell(error: float | None) -> str:
    return "-" if error is None else f"{error:.1%}"
