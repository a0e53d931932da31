"""Files that a command writes after minutes of work: whether they can be written is told before."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NO_MATPLOTLIB = "--plot needs matplotlib: pip install 'neaptide[plots]'"


def check_writable(path: Path) -> None:
    """Creates nothing.

    Raises:
        ValueError: a file could not be written there; the message is one line.
    """
    if path.is_dir():
        raise ValueError(f"{path}: is a directory, not a file")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent}: no such directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path}: cannot be written")


def check_plot(path: Path) -> None:
    """Of ``--plot``. Creates nothing.

    Raises:
        ValueError: nothing could be drawn there; the message is one line.
    """
    if find_spec("matplotlib") is None:
        raise ValueError(NO_MATPLOTLIB)
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in formats:
        raise ValueError(f"--plot {path}: the file must end in one of .{', .'.join(sorted(formats))}")
    check_writable(path)


def draw(plot: Callable[[Any], None], path: Path) -> None:
    """``plot`` gets an empty ``matplotlib.figure.Figure``. Raises OSError."""
    from matplotlib.figure import Figure  # no pyplot: it wants a display and keeps global state

    figure = Figure(figsize=(10, 5), layout="constrained")
    plot(figure)
    figure.savefig(path, dpi=120)
