"""The report of one or more runs as a single HTML file, without scripts or external files, so that it can be mailed."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from neaptide.loadgen.client.recorder import ChatRecord
from neaptide.loadgen.report.summary import Summary, met
from neaptide.loadgen.report.svg import Line, Plot, cumulative, figure, shown
from neaptide.loadgen.run.runner import Progress
from neaptide.loadgen.run.samples import KV_STATES

BINS = 60
LEAST_IN_BIN = 5
"""Mean number of requests per bin: a fraction of fewer says little."""
ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("requests", ("requests",)),
    ("failed", ("failed",)),
    ("cancelled by the client", ("cancelled",)),
    ("TTFT p50, ms", ("ttft_ms", "p50")),
    ("TTFT p99, ms", ("ttft_ms", "p99")),
    ("TPOT p50, ms", ("tpot_ms", "p50")),
    ("TPOT p99, ms", ("tpot_ms", "p99")),
    ("gap p99, ms", ("itl_ms", "p99")),
    ("longest gap, ms", ("longest_gap_ms",)),
    ("met TTFT", ("attainment", "ttft")),
    ("met TPOT", ("attainment", "tpot")),
    ("met both", ("attainment", "both")),
    ("requests/s", ("requests_per_s",)),
    ("output tokens/s", ("output_tokens_per_s",)),
    ("offline tokens/s", ("offline_tokens_per_s",)),
    ("step prediction error", ("step_prediction_error",)),
    ("sent late p99, ms", ("late_ms", "p99")),
)


def report(
    runs: Mapping[str, tuple[Progress, Summary]],
    settings: Mapping[str, Any],
    title: str,
    ratios: Mapping[str, Mapping[str, float | None]] | None = None,
) -> str:
    """The whole page. ``ratios`` are relative to the first run, by run name."""
    several = len(runs) > 1
    sections = [_table(runs)]
    if ratios:
        sections.append(_ratios(ratios))
    if several:
        sections.append(f"<section class='plots'>{_shared(runs)}</section>")
    for name, (progress, _) in runs.items():
        heading = f"<h2>{escape(name)}</h2>" if several else ""
        sections.append(f"{heading}<section class='plots'>{_plots(progress, alone=not several)}</section>")
    sections += [_errors(runs), _settings(settings)]
    return document(title, f"<h1>{escape(title)}</h1>{''.join(sections)}")


def document(title: str, body: str) -> str:
    """A whole page around its content, with the style of all reports; it loads nothing."""
    style = resources.files("neaptide.loadgen.report").joinpath("page.css").read_text(encoding="utf-8")
    head = "<meta charset='utf-8'><meta name='viewport' content='width=device-width,initial-scale=1'>"
    head += "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none';style-src 'unsafe-inline'\">"
    return (
        f"<!doctype html><html lang='en'><head>{head}<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _table(runs: Mapping[str, tuple[Progress, Summary]]) -> str:
    names = "".join(f"<th scope='col'>{escape(name)}</th>" for name in runs)
    rows = []
    for label, path in ROWS:
        cells = "".join(f"<td>{cell_text(label, found, path)}</td>" for _, found in runs.values())
        rows.append(f"<tr><th scope='row'>{label}</th>{cells}</tr>")
    body = "".join(rows)
    table = f"<table><thead><tr><td></td>{names}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class='wide' tabindex='0'>{table}</div>"


def _ratios(ratios: Mapping[str, Mapping[str, float | None]]) -> str:
    first, *others = ratios
    names = "".join(f"<th scope='col'>{escape(name)}</th>" for name in others)
    rows = []
    for figure_name in ratios[first]:
        values = [ratios[name][figure_name] for name in others]
        cells = "".join(f"<td>{'-' if value is None else f'{value:.3f}'}</td>" for value in values)
        rows.append(f"<tr><th scope='row'>{figure_name.replace('_', ' ')}</th>{cells}</tr>")
    head = (
        f"<h2>Over {escape(first)}</h2><div class='wide' tabindex='0'><table><thead><tr><td></td>{names}</tr></thead>"
    )
    return f"{head}<tbody>{''.join(rows)}</tbody></table></div>"


def cell_text(label: str, found: Summary, path: Sequence[str]) -> str:
    """The text of a cell in a row of ``ROWS``."""
    value: Any = found
    for name in path:
        value = value[name]
    if value is None:
        return "-"
    if label.startswith("met") or label.endswith("error"):
        return f"{value:.1%}"
    return str(value) if isinstance(value, int) else f"{value:,.1f}"


def _shared(runs: Mapping[str, tuple[Progress, Summary]]) -> str:
    """The latency distributions of all servers, one plot each."""
    ttft = [cumulative(name, _ms(r.ttft_s for r in fine(p))) for name, (p, _) in runs.items()]
    tpot = [cumulative(name, _ms(r.tpot_s for r in fine(p))) for name, (p, _) in runs.items()]
    one = next(iter(runs.values()))[0]
    return figure(_distribution("TTFT", ttft, one)) + figure(_distribution("TPOT", tpot, one))


def _plots(progress: Progress, *, alone: bool) -> str:
    plots = [_attainment(progress), _throughput(progress), _kv(progress), _steps(progress)]
    if progress.watch.batch_progress:
        plots.append(_batch(progress))
    if alone:
        ttft = [cumulative("TTFT", _ms(r.ttft_s for r in fine(progress)))]
        tpot = [cumulative("TPOT", _ms(r.tpot_s for r in fine(progress)))]
        plots = [_distribution("TTFT", ttft, progress), _distribution("TPOT", tpot, progress), *plots]
    return "".join(figure(plot) for plot in plots)


def fine(progress: Progress) -> list[ChatRecord]:
    return [record for _, record in progress.records if record.error is None and not record.cancelled]


def _ms(values: Any) -> list[float]:
    return [1e3 * value for value in values if value is not None]


def _distribution(name: str, lines: Sequence[Line], progress: Progress) -> Plot:
    targets = dict.fromkeys(shot.target for shot in progress.shots)
    marks = dict.fromkeys(1e3 * (t.ttft_s if name == "TTFT" else t.tpot_s) for t in targets)
    return Plot(
        name,
        "ms",
        "% of requests at or below",
        lines,
        x_marks=[(f"target {shown(mark)}", mark) for mark in marks],
        y_max=100.0,
    )


def _attainment(progress: Progress) -> Plot:
    pairs = progress.records
    last_s = max((record.arrival_s for _, record in pairs), default=0.0)
    width_s = max(_width_s(last_s), LEAST_IN_BIN * last_s / max(1, len(pairs)))
    xs = [width_s * (k + 0.5) for k in range(math.floor(last_s / width_s) + 1)]
    bins: list[list[bool]] = [[] for _ in xs]
    for shot, record in pairs:
        bins[math.floor(record.arrival_s / width_s)] += [a and b for a, b in met([(shot, record)])]
    ys = [100 * sum(each) / len(each) if each else None for each in bins]
    return Plot("Requests that met both targets", "s", "% of arrivals", [Line("both", xs, ys)], y_max=100.0)


def _throughput(progress: Progress) -> Plot:
    """Tokens computed by the engine; for other servers, the pieces that the clients received."""
    samples = progress.watch.samples
    if samples:
        xs = [sample.at_s for sample in samples]
        lines = [Line(name, xs, [s.tokens_per_s[name] for s in samples]) for name in ("online", "offline")]
        return Plot("Tokens computed, by tier", "s", "tokens/s", lines, stacked=True)
    records = fine(progress)
    start_s = min((record.start_s - record.arrival_s for record in records), default=0.0)
    times = [at_s - start_s for record in records for at_s in record.token_times_s]
    width_s = _width_s(max(times, default=0.0))
    counts = [0.0] * (math.floor(max(times, default=0.0) / width_s) + 1)
    for at_s in times:
        counts[math.floor(at_s / width_s)] += 1 / width_s
    xs = [width_s * (k + 0.5) for k in range(len(counts))]
    return Plot("Output pieces received", "s", "pieces/s", [Line("online", xs, counts if times else [None])])


def _kv(progress: Progress) -> Plot:
    samples = progress.watch.samples
    xs = [sample.at_s for sample in samples]
    lines = [Line(state, xs, [sample.kv_blocks[state] for sample in samples]) for state in KV_STATES]
    return Plot("KV blocks, by class", "s", "blocks", lines, stacked=True)


def _steps(progress: Progress) -> Plot:
    samples = progress.watch.samples
    xs = [sample.at_s for sample in samples]
    kinds = (
        ("predicted", [sample.predicted_step_s for sample in samples]),
        ("measured", [sample.measured_step_s for sample in samples]),
    )
    lines = [Line(name, xs, [None if y is None else 1e3 * y for y in ys]) for name, ys in kinds]
    return Plot("Mean time of a step", "s", "ms", lines)


def _batch(progress: Progress) -> Plot:
    points = progress.watch.batch_progress
    ended = Line("lines", [at_s for at_s, _, _ in points], [float(done) for _, done, _ in points])
    return Plot("Batch lines that have ended", "s", "lines", [ended], y_max=float(max(total for _, _, total in points)))


def _width_s(last_s: float) -> float:
    return max(1.0, last_s / BINS)


def _errors(runs: Mapping[str, tuple[Progress, Summary]]) -> str:
    items = [
        f"<li>{escape(name)}: {count} &times; {escape(error)}</li>"
        for name, (_, found) in runs.items()
        for error, count in found["errors"].items()
    ]
    return f"<h2>Errors</h2><ul>{''.join(items)}</ul>" if items else ""


def _settings(settings: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th scope='row'>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in settings.items()
    )
    return f"<details><summary>Settings of this run</summary><table>{rows}</table></details>"
