"""Draws simulations: offline work against chats in time, and how long chats wait for their first token."""

from collections.abc import Sequence
from typing import Any

from neaptide.simulation.simulator import Run

MS = 1e3


def plot_runs(figure: Any, runs: Sequence[tuple[str, Run]]) -> None:
    """Draws named runs of one load on an empty ``matplotlib.figure.Figure``."""
    chats = [(name, run) for name, run in runs if run.result.online.requests]
    work = [(name, run) for name, run in runs if run.result.offline.bound_tokens_per_s["window"] is not None]
    panels = [panel for panel, wanted in ((_draw_work, work), (_draw_waits, chats)) if wanted]
    result, settings = runs[0][1].result, runs[0][1].result.settings
    figure.suptitle(
        f"Simulated on {result.profile}: TTFT target {settings.ttft_slo_s:g} s, TPOT target "
        f"{MS * settings.tpot_slo_s:g} ms"
    )
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        panel(axes, work if panel is _draw_work else chats)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize="small")


def _draw_work(axes: Any, runs: Sequence[tuple[str, Run]]) -> None:
    """A bar of offline tokens per second for each run, with its bound as a mark."""
    names = [_label(name, run) for name, run in runs]
    offline = [run.result.offline for _, run in runs]
    axes.barh(names, [one.tokens_per_s or 0.0 for one in offline], label="offline work")
    bounds = [one.bound_tokens_per_s["in_time"] or 0.0 for one in offline]
    axes.plot(bounds, names, "k|", markersize=16, markeredgewidth=2, label="no policy can exceed")
    axes.invert_yaxis()
    axes.set(title="Offline work", xlabel="offline tokens/s")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", nbins=4)


def _label(name: str, run: Run) -> str:
    if not run.result.online.requests:
        return name
    return f"{name}\n{run.result.attained:.1%} of chats in time"


def _draw_waits(axes: Any, runs: Sequence[tuple[str, Run]]) -> None:
    """The share of chats that wait longer than a time for their first token."""
    for name, run in runs:
        from_s, to_s = run.window_s
        records = [one for one in run.measures.online.values() if from_s <= one.arrival_s <= to_s]
        end_s = max([one.last_s for one in records if one.tokens], default=to_s)
        waits_ms = sorted(MS * one.ttft_s(end_s) for one in records)
        shares = [1.0 - number / len(waits_ms) for number in range(len(waits_ms))]
        axes.step(waits_ms, shares, where="post", label=name)
    target_ms = MS * runs[0][1].result.settings.ttft_slo_s
    axes.axvline(target_ms, linestyle="--", color="grey", label="TTFT target")
    axes.set(title="Waits for the first token", xlabel="milliseconds", ylabel="share of chats that wait longer")
    axes.set_xscale("log")
    axes.set_yscale("log")
