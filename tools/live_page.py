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
WIDTH = 120
BEGIN, END = "Measured on", "\n\n"
"""Where the paragraph begins and ends."""


def paragraph(line: Mapping[str, Any]) -> str:
    """The paragraph under README's picture, without a newline at its end.

    Args:
        line: a complete run with the rivals.
    """
    load = line["loads"][0]
    runs = {run["run"]: run for run in load["runs"]}
    both, alone, num_chats = runs[BOTH], runs[ALONE], runs[BOTH]["online_requests"]
    rivals = [point for point in load["points"] if point["over_alone"] is None]
    names = " and ".join(f"`{rival['name']}`" for rival in rivals)
    most = max(round(rival["attainment"] * num_chats) for rival in rivals)
    rate, ceiling = both["offline_tokens_per_s"], runs[CEILING]["offline_tokens_per_s"]
    text = (
        f"{BEGIN} {line['cpus']} CPU threads (111M parameters, chats at {load['load']:.0%} load): {_met(both)} of "
        f"{num_chats} chats met their targets beside a batch, {_met(alone)} without it. The batch ran at "
        f"{rate / ceiling:.0%} of its stand-alone speed ({rate:,.0f} of {ceiling:,.0f} tokens/s). Under vLLM's {names} "
        f"{'no chat' if not most else f'at most {most}'} met its targets. "
        "Command: `python -m benchmarks.live_coserving --medium`."
    )
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


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
