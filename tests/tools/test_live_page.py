"""``tools.live_page``: README's figures from a line of the live experiment."""

from typing import Any

import pytest

from tools.live_page import BEGIN, END, WIDTH, paragraph
from tools.pages import with_part


def line(met: float = 0.5, of_rivals: tuple[float, ...] = (0.0, 0.0)) -> dict[str, Any]:
    """Of a run with eight chats, all in time without the batch."""
    runs: list[dict[str, Any]] = [
        {"run": "offline", "offline_tokens_per_s": 1000.4},
        {"run": "online alone", "online_requests": 8, "attainment": 1.0},
        {"run": "both", "online_requests": 8, "attainment": met, "offline_tokens_per_s": 499.6},
    ]
    rivals = [{"name": f"r{n}", "attainment": met, "over_alone": None} for n, met in enumerate(of_rivals)]
    points = [{"name": "target", "attainment": 1.0, "over_alone": 2.4}, *rivals]
    return {"cpus": 3, "loads": [{"load": 0.25, "runs": runs, "points": points}]}


def test_the_paragraph_says_what_the_line_says() -> None:
    said = paragraph(line())
    assert said.replace("\n", " ").startswith(
        "Measured on 3 CPU threads (111M parameters, chats at 25% load): 4 of 8 chats met their targets beside a "
        "batch, 8 without it. The batch ran at 50% of its stand-alone speed (500 of 1,000 tokens/s). Under vLLM's `r0` "
        "and `r1` no chat met its targets. "
    )
    assert max(map(len, said.splitlines())) <= WIDTH


def test_rivals_that_kept_some_are_said_by_the_best_of_them() -> None:
    assert "`r1` at most 3 met its targets" in paragraph(line(of_rivals=(0.125, 0.375))).replace("\n", " ")


def test_the_paragraph_takes_the_place_of_the_one_before() -> None:
    readme = "# N\n\nMeasured on old\nfigures.\n\nEnd.\n"
    assert with_part(readme, BEGIN, END, "Measured on new ones.") == "# N\n\nMeasured on new ones.\n\nEnd.\n"
    with pytest.raises(ValueError, match="substring"):
        with_part("# N\n", BEGIN, END, "new")
