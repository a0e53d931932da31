"""A worker whose compiler does what the text of a line says. Leaves marks, so that a test sees where it was."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from neaptide.server.batches.checking.worker import main
from neaptide.server.batches.lines import CompiledLine
from tests.server.batches.fake_compiler import FakeCompiler


def count(marks: Path, name: str) -> int:
    """How often a mark was left."""
    mark = marks / name
    return mark.stat().st_size if mark.exists() else 0


class HostileCompiler(FakeCompiler):
    def __init__(self, marks: Path) -> None:
        super().__init__()
        self._marks = marks

    def compile(self, endpoint: str, body: dict[str, Any]) -> CompiledLine:
        text = body["messages"][-1]["content"]
        if text == "die" or (text == "die once" and not count(self._marks, text)):
            self._mark(text)
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "hang":
            self._mark(text)
            time.sleep(600)
        if text == "rest":
            time.sleep(0.01)
        if text == "eat":
            return CompiledLine([list(bytes(1 << 40))], [], wants_stream=False)
        if text == "raise":
            raise ZeroDivisionError("secret words of the file")
        return super().compile(endpoint, body)

    def _mark(self, name: str) -> None:
        with (self._marks / name).open("ab") as f:
            f.write(b"x")


if __name__ == "__main__":
    main(lambda recipe: HostileCompiler(Path(recipe.tokenizer_dir)))
