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
    ratios = {"share": 0.904, "ttft_p99_vs_alone": 1.126}
    return {"ratios": ratios, "cpus": 3, "loads": [{"load": 0.25, "runs": runs, "points": points}]}


def test_the_paragraph_says_what_the_line_says() -> None:
    said = paragraph(line())
    assert said.replace("\n", " ").startswith(
        "What that wins, over HTTP on 3 CPU threads with a model of 111M parameters, chats at 25% of what the machine "
        "can do and a batch that never runs dry: 4 of 8 chats kept their targets (8 without the batch), and the batch "
        "did **500 of the 1000 tokens/s** that the machine does without chats (0.90 of what chats under these targets "
        "leave; the slowest first token in a hundred took 1.13 times as long). Under `r0` and `r1` on the same engine "
        "no chat did. ["
    )
    assert max(map(len, said.splitlines())) <= WIDTH


def test_rivals_that_kept_some_are_said_by_the_best_of_them() -> None:
    assert "on the same engine at most 3 did" in paragraph(line(of_rivals=(0.125, 0.375))).replace("\n", " ")


def test_chats_without_an_answer_are_said() -> None:
    found = line()
    found["ratios"]["ttft_p99_vs_alone"] = None
    assert "leave; more than one chat in a hundred had no answer). Under" in paragraph(found).replace("\n", " ")


def test_the_paragraph_takes_the_place_of_the_one_before() -> None:
    readme = "# N\n\nWhat that wins, of old\nfigures.\n\n![picture](docs/live.svg)\n\nEnd.\n"
    assert with_part(readme, BEGIN, END, "What that wins, new.") == (
        "# N\n\nWhat that wins, new.\n\n![picture](docs/live.svg)\n\nEnd.\n"
    )
    with pytest.raises(ValueError, match="substring"):
        with_part("# N\n", BEGIN, END, "new")
