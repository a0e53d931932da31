"""What commands have in common: the server's address, results on a terminal and in files, checks of output files."""

import argparse
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

STDOUT = Path("-")
"""Value of ``--json`` that stands for standard output."""
JSON_HELP = "write the result to this file as one line of JSON; - prints it, also on a terminal"
NO_MATPLOTLIB = "--plot needs matplotlib: pip install 'neaptide[plots]'"


def add_server(parser: argparse.ArgumentParser, base_url: str) -> None:
    """Adds ``--server``, the address of the server that a client command talks to; ``base_url`` is the default."""
    parser.add_argument(
        *("--server", "--base-url"),
        default=base_url,
        metavar="URL",
        help=f"the server, with or without /v1 ({base_url})",
    )


def check_writable(path: Path) -> None:
    """Checks a path without creating anything.

    Raises:
        ValueError: a file cannot be written there. The message is one line.
    """
    if path == STDOUT:
        return
    if path.is_dir():
        raise ValueError(f"{path} is a directory, not a file")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent}: no such directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written")


def write_json(line: str, path: Path | None) -> None:
    """Writes a result's JSON line to the file of ``--json``, if there is one. Raises OSError."""
    if path is not None and path != STDOUT:
        path.write_text(line + "\n", encoding="utf-8")


def print_json(line: str, path: Path | None) -> None:
    """Prints a result's JSON line for programs: always with ``--json -``, else unless standard output is a terminal."""
    if path == STDOUT or not sys.stdout.isatty():
        print(line)


def check_plot(path: Path) -> None:
    """Checks the path of ``--plot`` without creating anything.

    Raises:
        ValueError: a plot cannot be written there. The message is one line.
    """
    if find_spec("matplotlib") is None:
        raise ValueError(NO_MATPLOTLIB)
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in formats:
        raise ValueError(f"--plot {path}: the file must end in one of .{', .'.join(sorted(formats))}")
    check_writable(path)


def draw(plot: Callable[[Any], None], path: Path) -> None:
    """Passes an empty ``matplotlib.figure.Figure`` to ``plot`` and saves it. Raises OSError."""
    from matplotlib.figure import Figure  # no pyplot: it needs a display and keeps global state

    figure = Figure(figsize=(10, 5), layout="constrained")
    plot(figure)
    figure.savefig(path, dpi=120)
