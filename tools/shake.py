"""Looks for flaky tests: runs some of them repeatedly in random order, every second time on a busy machine.

    python -m tools.shake                                   # tests of processes, 20 times
    python -m tools.shake --times 5 tests/server/engine_client       # others

Each failure is appended to ``--out`` with its seed. The exit status is 1 if anything failed.
"""

import argparse
import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from neaptide.engine.process.beside import beside

PROCESSES = [
    "tests/server/engine_client",
    "tests/server/subprocesses",
    "tests/server/counterfactual",
    "tests/server/batches/checking",
    "tests/engine/process",
    "tests/commands",
    "tests/e2e",
]


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Processes that use all the processor time that they get."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            loop = stack.enter_context(subprocess.Popen(beside([sys.executable, "-c", "while True: pass"])))
            stack.callback(loop.kill)
        yield


def run(number: int, words: Sequence[str], out: Path) -> bool:
    """Runs the tests once. Returns whether they passed."""
    seed, is_busy, began_s = secrets.randbelow(1 << 32), bool(number % 2), time.monotonic()
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider"]
    command += [f"--randomly-seed={seed}", *words]
    with busy_loops((os.cpu_count() or 1) if is_busy else 0):
        done = subprocess.run(beside(command), capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    print(
        f"{number}: seed {seed}, {'busy' if is_busy else 'quiet'}, {time.monotonic() - began_s:.0f} s: {last}",
        flush=True,
    )
    if done.returncode:
        with out.open("a") as file:
            file.write(f"==== run {number}, seed {seed}, busy {is_busy}\n{done.stdout}\n{done.stderr}\n")
    return not done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", default=PROCESSES, help="tests; further pytest arguments after --")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("shaken.txt"))
    args = parser.parse_args()
    passed = [run(number, args.words, args.out) for number in range(args.times)]
    print(f"{passed.count(True)} of {len(passed)} runs passed")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
