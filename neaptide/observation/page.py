"""The forecast as one HTML page, without scripts or external files."""

from collections.abc import Iterable
from html import escape

from neaptide.loadgen.report.page import document
from neaptide.loadgen.report.svg import Line, Plot, figure
from neaptide.observation import words
from neaptide.observation.forecast import ALONE, FCFS, INSIDE, INSTEAD, Estimate, ForecastOption
from neaptide.observation.words import Facts

TITLE = "Batch work beside your chats"
HEADINGS = ("chats in time, %", "batch tokens/s", "TTFT p50, p99 (ms)", "TPOT p50, p99 (ms)")
COST_NAMES = {
    "fixed_s": "a step without prompts",
    "stream_s": "each stream in it",
    "prompt_step_s": "a step with prompts",
    "token_s": "each token in it",
    "kv_token_s": "each cached token that is read",
    "pair_s": "each pair of prompt tokens",
}
COLOURS = (INSIDE, INSTEAD, ALONE)
"""Order of the plot's colours; then the best priority."""


def page(facts: Facts) -> str:
    """The whole page."""
    sections = [
        f"<h1>{TITLE}</h1>",
        f"<p><strong>{escape(words.sentence(facts))}</strong></p>",
        _list("Read this first", words.warnings(facts)),
        f"<p>{escape(words.recorded(facts))}</p>",
        f"<p>{escape(words.repetitions(facts))}</p>",
        _table(facts),
        f"<p>In time: within both targets, {escape(words.targets(facts))}. In brackets: 90% intervals, from the number "
        "of chats, the runs with other draws and, for tokens, the error of step times. TTFT and TPOT have none. Batch "
        "tokens are prompt and answer tokens. A dash: no batch work, or no chat that ended.</p>",
        f"<section class='plots'>{figure(_plot(facts))}</section>",
        _list("What this rests on", words.assumptions(facts)),
        _list("What would show that it is wrong", words.falsifiers(facts)),
        _list("What this page does not say", words.silences(facts)),
        _costs(facts),
    ]
    return document(TITLE, "".join(sections))


def _list(heading: str, items: Iterable[str]) -> str:
    entries = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<h2>{heading}</h2><ul>{entries}</ul>" if entries else ""


def _table(facts: Facts) -> str:
    head = "".join(f"<th scope='col'>{heading}</th>" for heading in HEADINGS)
    rows = []
    for option in facts.forecast.options:
        named = zip(HEADINGS, _cells(option), strict=True)
        cells = "".join(f"<td data-name='{heading}'>{cell}</td>" for heading, cell in named)
        rows.append(f"<tr><th scope='row'>{escape(words.option_name(facts, option))}</th>{cells}</tr>")
    table = f"<table class='stacked'><thead><tr><td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"<div class='wide' tabindex='0'>{table}</div>"


def _cells(option: ForecastOption) -> list[str]:
    attained, rate = option.attainment, option.batch_tokens_per_s
    share = f"{100 * attained.value:.1f} ({100 * attained.low:.1f} to {100 * attained.high:.1f})"
    tokens = "-" if option.name == ALONE else words.rate_text(rate)
    return [share, tokens, *(_pair(values) for values in (option.ttft_s, option.tpot_s))]


def _pair(values: dict[str, float | None]) -> str:
    return ", ".join("-" if values[name] is None else f"{1e3 * (values[name] or 0.0):,.0f}" for name in ("p50", "p99"))


def _plot(facts: Facts) -> Plot:
    """Chats in time over batch tokens/s, each option as a cross of its two intervals."""
    found = facts.forecast
    shown = [found.option(name) for name in (*COLOURS, found.best_priority, FCFS)]
    lines = [_cross(words.option_name(facts, one), one.batch_tokens_per_s, one.attainment) for one in shown]
    return Plot("Chats in time and batch work", "batch tokens/s", "% of chats in time", lines, y_max=100.0)


def _cross(name: str, across: Estimate, up: Estimate) -> Line:
    low, value, high = (100 * share for share in (up.low, up.value, up.high))
    xs = [across.low, across.high, across.value, across.value, across.value]
    return Line(name, xs, [value, value, None, low, high])


def _costs(facts: Facts) -> str:
    times = facts.times
    if times is None:
        return ""
    rows = "".join(
        f"<tr><th scope='row'>{said}</th><td>{1e6 * times.costs[name]:.4g}</td>"
        f"<td>{1e6 * times.spread[name][0]:.4g} to {1e6 * times.spread[name][1]:.4g}</td></tr>"
        for name, said in COST_NAMES.items()
    )
    return (
        "<details><summary>The inferred costs of a step, in microseconds</summary><table><thead><tr><td></td>"
        f"<th>µs</th><th>90% interval</th></tr></thead><tbody>{rows}</tbody></table></details>"
    )
