"""Writes README's figures and ``docs/live.svg`` from ``docs/live.json``, the last line of the live experiment.

    python -m benchmarks.live_coserving --medium --json docs/live.json && python -m tools.live_page

This takes about 15 minutes on an otherwise idle machine. A test compares README's figures with the line.
"""

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.live.findings import ALONE, BOTH, CEILING
from tools.pages import with_part

REPOSITORY = Path(__file__).parents[1]
LINE, PICTURE, README = (REPOSITORY / name for name in ("docs/live.json", "docs/live.svg", "README.md"))
WIDTH = 155
BEGIN, END = "What that wins,", "\n\n!["
"""Begin and end of the paragraph, which is followed by the picture."""


def paragraph(line: Mapping[str, Any]) -> str:
    """README's paragraph, without its line end.

    Args:
        line: a complete run with the rivals.
    """
    load, ratios = line["loads"][0], line["ratios"]
    runs = {run["run"]: run for run in load["runs"]}
    both, alone, num_chats = runs[BOTH], runs[ALONE], runs[BOTH]["online_requests"]
    rivals = [point for point in load["points"] if point["over_alone"] is None]
    names = " and ".join(f"`{rival['name']}`" for rival in rivals)
    most = max(round(rival["attainment"] * num_chats) for rival in rivals)
    text = (
        f"{BEGIN} over HTTP on {line['cpus']} CPU threads with a model of 111M parameters, chats at "
        f"{load['load']:.0%} of what the machine can do and a batch that never runs dry: {_met(both)} of {num_chats} "
        f"chats kept their targets ({_met(alone)} without the batch), and the batch did "
        f"**{both['offline_tokens_per_s']:.0f} of the {runs[CEILING]['offline_tokens_per_s']:.0f} tokens/s** that the "
        f"machine does without chats ({ratios['share']:.2f} of what chats under these targets leave; "
        f"{_slowest(ratios['ttft_p99_vs_alone'])}). Under {names} on the same "
        f"engine {'no chat' if not most else f'at most {most}'} did. "
        "[How it is measured, and on your machine]"
        "(docs/experiments.md#the-live-experiment-and-the-soak) · [all runs](docs/log.md)."
    )
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _slowest(times: float | None) -> str:
    """The slowdown of the slowest first tokens.

    Args:
        times: ratio to online work alone; None if too many chats had no answer.
    """
    if times is None:
        return "more than one chat in a hundred had no answer"
    return f"the slowest first token in a hundred took {times:.2f} times as long"


def _met(run: Mapping[str, Any]) -> int:
    return round(run["attainment"] * run["online_requests"])


def main() -> None:
    from benchmarks.live.findings import from_json
    from benchmarks.live.picture import draw_picture

    line = json.loads(LINE.read_text(encoding="utf-8"))
    README.write_text(with_part(README.read_text(encoding="utf-8"), BEGIN, END, paragraph(line)), encoding="utf-8")
    draw_picture(from_json(line)["curves"], PICTURE)


if __name__ == "__main__":
    main()
