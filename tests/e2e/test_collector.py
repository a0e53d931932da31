"""The garbage collector of the process that answers clients passes over what start-up has allocated."""

import os
from pathlib import Path

from tests.e2e.server import RunningServer

AT_EXIT = """
import atexit, gc, os, sys
def note():
    if "-m" in sys.orig_argv and "neaptide" in sys.orig_argv:
        open(os.environ["FROZEN"], "w").write(f"{gc.get_freeze_count()} {len(gc.get_objects())}")
atexit.register(note)
"""
FEW_OBJECTS = 50_000
"""A full collection walks them in the time of a token. A server has imported three times as many."""


def test_a_full_collection_keeps_no_client_waiting(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    env = {"PYTHONPATH": path, "FROZEN": str(tmp_path / "frozen")}
    with RunningServer(tmp_path, "--executor", "sim", env=env) as server:
        server.http.get("/metrics").raise_for_status()
    frozen, walked = map(int, (tmp_path / "frozen").read_text().split())
    assert walked < FEW_OBJECTS < frozen
