"""``neaptide why``: says why a chat was late."""

import argparse
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx
from rich.console import Console
from rich.table import Table

from neaptide.commands.client import add_client, call, run_client

LEAST_SHARE = 0.005
"""Share of a wait below which a part is not shown."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", base_url: str) -> None:
    """Adds the ``why`` command; ``base_url`` is the default server."""
    parser = subparsers.add_parser("why", help="say why a chat of the last 15 minutes was late")
    parser.add_argument("id", metavar="REQUEST_ID", help="id of the reply, or its X-Request-Id header")
    parser.add_argument("--json", action="store_true", help="print the whole answer as one line of JSON")
    add_client(parser, base_url)
    parser.set_defaults(func=lambda args: run_client("why", _why, args))


def _why(client: httpx.Client, args: argparse.Namespace) -> int:
    answer = call(client, "GET", f"/admin/why/{quote(args.id, safe='')}")
    if args.json:
        print(json.dumps(answer))
        return 0
    print(answer["sentence"])
    console = Console(highlight=False)
    if console.is_terminal:
        for wait in answer["waits"]:
            _show(console, wait)
    return 0


def _show(console: Console, wait: Mapping[str, Any]) -> None:
    """The parts and the longest steps of a wait, as tables."""
    parts = Table(box=None, pad_edge=False)
    parts.add_column("part")
    parts.add_column("ms", justify="right")
    parts.add_column("late ms", justify="right")
    for name, took_ms in sorted(wait["parts_ms"].items(), key=lambda item: -item[1]):
        if took_ms >= LEAST_SHARE * wait["took_ms"]:
            parts.add_row(name.replace("_", " "), f"{took_ms:.1f}", f"{wait['late_parts_ms'][name]:.1f}")
    console.print("", wait["sentence"] if wait["what"] == "longest_gap" else "Its first token:", parts, sep="\n")
    steps = Table(box=None, pad_edge=False)
    shown = ("at_ms", "busy_ms", "predicted_ms", "prompt_tokens", "streams", "batch_tokens", "waiting", "judgement")
    for name in shown:
        steps.add_column(name.replace("_", " "), justify="left" if name == "judgement" else "right")
    for step in wait["steps"]:
        steps.add_row(*(f"{step[name]:.1f}" if name.endswith("_ms") else str(step[name]) for name in shown))
    console.print(f"\nThe {len(wait['steps'])} longest of {wait['num_steps']} steps meanwhile:", steps, sep="\n")
