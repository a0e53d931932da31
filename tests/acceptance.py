"""The acceptance table: which fault was tried, how often, and what came of it, written by the tests themselves.

A test says what it shows with ``@pytest.mark.acceptance("A12", "clients that leave early", count=2000)``;
``pytest --acceptance-out=FILE`` writes the table; with ``--acceptance-rows=A5,A12`` it runs the tests of these rows and
replaces their lines. Rows that are not reached stand in ``ratchet.toml``.
"""

import subprocess
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

PROPERTY = "acceptance"
"""Under this name a report has a row, what was tried, and how often."""

RATCHET = Path(__file__).with_name("ratchet.toml")


@dataclass(frozen=True)
class Fault:
    """What a row is about. ``real`` and ``simulated`` say what its tests ran on, so that a row claims no more."""

    name: str
    real: str
    simulated: str


_SERVICE = Fault("", "batch service, SQLite, files", "engine (in-process fake); time")
_APP = "the whole ASGI app"
_SERVER = "`neaptide serve`, two processes, sockets"
_FAKE, _STEPS = "engine (in-process fake)", "step times and tokens of the engine"

ROWS = {
    "A1": Fault(
        "`kill -9` while a batch runs: of the service at system calls of eight names, of the process that checks "
        "files, of engine and API at random moments",
        "kernel, SQLite, files; the 21 kills under load: `neaptide serve` with the embedded model",
        "the kills at system calls: one process of service and fake engine",
    ),
    "A2": Fault("engine killed in the middle of streams", f"{_SERVER}; engine process", _STEPS),
    "A3": Fault("a batch line that kills the engine twice", f"{_SERVER}; SIGSEGV", f"{_STEPS}; once {_FAKE}"),
    "A4": Fault(
        "an exception from one request in plan, prepare, model, sampler or detokenizer",
        "engine core with the torch executor; the ASGI app",
        f"the exceptions (raised by patches); for the detokenizer {_FAKE}",
    ),
    "A5": Fault("an engine that hangs", f"{_SERVER}; SIGSTOP", _STEPS),
    "A6": Fault(
        "NaN or infinite logits in one row", "engine core with the torch executor", f"the NaN; for its counting {_FAKE}"
    ),
    "A7": Fault(
        "KV cache exhausted, ten times over-admitted", "engine core with the torch executor, a small random model", "-"
    ),
    "A8": Fault(
        "disk full during result, finalize, upload, log",
        f"a full file system under {_SERVER} (one test)",
        f"ENOSPC and a full database in the others; {_FAKE}",
    ),
    "A9": Fault("I/O errors on write and fsync", "service, SQLite, files", f"the errors (at system calls); {_FAKE}"),
    "A10": Fault("damaged database, log or file at start", "service, SQLite, files, flipped bytes", _FAKE),
    "A11": Fault("database locked, data directory or port in use", f"{_SERVER}; SQLite locked by another process", "-"),
    "A12": Fault("clients that leave before or during the answer", f"{_SERVER} (12,000)", f"{_STEPS}; else {_FAKE}"),
    "A13": Fault("readers that are too slow", f"sockets; {_SERVER} (550)", f"{_STEPS}; else {_FAKE}"),
    "A14": Fault("slow headers, slow bodies, silent sockets", f"sockets; {_SERVER} (1,650)", f"{_STEPS}; else {_FAKE}"),
    "A15": Fault("more streams than the server admits", f"{_APP}; sockets", _FAKE),
    "A16": Fault(
        "SIGTERM to both processes in the middle of streams and a batch; SIGTERM twice while a stream runs",
        f"{_SERVER}, restarted on the same data; what the streams' sockets and the batch's results say",
        f"{_STEPS}; what a new connection gets meanwhile is not part of this row",
    ),
    "A17": Fault("SIGKILL of the API process alone", _SERVER, _STEPS),
    "A18": Fault("torn, oversized and malformed uploads", f"{_APP}, service, SQLite, files; sockets (10)", _FAKE),
    "A19": Fault(
        "a batch created twice by a client that retries",
        f"the SDK over sockets, {_APP}, service",
        f"lost replies; {_FAKE}",
    ),
    "A20": Fault("cancel in every phase", _SERVICE.real, _SERVICE.simulated),
    "A21": Fault("clock jumps while a batch runs", _SERVICE.real, _SERVICE.simulated),
    "A22": Fault("another model after a restart", _SERVICE.real, f"the other model (changed files); {_FAKE}"),
    "A23": Fault("JSON at its edges", f"{_APP}, service", _FAKE),
    "A24": Fault(
        "parameters at their edges, online and in a batch line", f"{_APP}; {_SERVER} (90)", f"{_STEPS} or {_FAKE}"
    ),
    "A25": Fault("hostile schemas and grammars", f"{_APP}; the child that compiles", _FAKE),
    "A26": Fault("text made to be slow to tokenize", f"the embedded model's tokenizer, {_APP}", _FAKE),
    "A27": Fault(
        "every route by key, tenant, path, host and method", f"{_APP}; {_SERVER} (14)", f"{_STEPS} or {_FAKE}"
    ),
    "A28": Fault("secrets in prompts, keys, names and headers", f"{_APP}; {_SERVER} (6)", f"{_STEPS} or {_FAKE}"),
}


@dataclass
class Row:
    tried: dict[str, int] = field(default_factory=dict)
    """What was tried, and how often; tests of one description add up."""
    passed: int = 0
    failed: int = 0


class Selection:
    """Makes tests say in their reports which rows they show; a pytest plugin of every worker.

    Args:
        names: the rows.
        alone: leaves out all other tests.
    """

    def __init__(self, names: set[str], *, alone: bool) -> None:
        self._names = names
        self._alone = alone

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        others = []
        for item in items:
            marks = [mark for mark in item.iter_markers("acceptance") if mark.args[0] in self._names]
            item.user_properties += [(PROPERTY, [*mark.args, int(mark.kwargs.get("count", 1))]) for mark in marks]
            if self._alone and not marks:
                others.append(item)
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


class AcceptanceTable:
    """Counts the outcomes of the tests of some rows; a pytest plugin of the process that hears from all workers."""

    def __init__(self, out: Path, names: set[str]) -> None:
        self._out = out
        self._rows = {name: Row() for name in ROWS if name in names}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and not report.failed:
            return
        for property_name, shown in report.user_properties:
            if property_name == PROPERTY:
                name, tried, count = cast("tuple[str, str, int]", shown)
                self._count(self._rows[name], tried, count, report)

    def _count(self, row: Row, tried: str, count: int, report: pytest.TestReport) -> None:
        if report.passed:
            row.passed += 1
            row.tried[tried] = row.tried.get(tried, 0) + count
        elif report.failed:
            row.failed += 1

    def pytest_sessionfinish(self) -> None:
        gaps, known, commit = load_ratchet(), known_rows(self._out), commit_of(self._out)
        lines = []
        for name, fault in ROWS.items():
            row = self._rows.get(name)
            if row is None:
                cells = known[name]
            else:
                tried = "; ".join(f"{what} ({times:,})" for what, times in sorted(row.tried.items())) or "-"
                passed = f"{row.passed} of {row.passed + row.failed}"
                cells = (tried, passed, commit, _outcome(row, gaps.get(name)))
            tried, *rest = cells
            lines.append(" | ".join((f"| {name}", fault.name, tried, fault.real, fault.simulated, *rest)) + " |")
        self._out.write_text("\n".join((HEADER, *lines)) + "\n", encoding="utf-8")


def known_rows(table: Path) -> dict[str, tuple[str, ...]]:
    """Of a table that was written before: row -> what was tried, tests passed, commit, outcome."""
    text = table.read_text(encoding="utf-8") if table.exists() else ""
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| A")]
    return {cells[1]: (cells[3], *cells[6:9]) for cells in rows}


def commit_of(table: Path, tree: Path = Path(__file__).parent) -> str:
    """What the tests ran on: the commit, with ``+`` where the tree differs from it, the table left aside."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tree), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    changed = [line for line in git("status", "--porcelain").splitlines() if not line.endswith(table.name)]
    return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")


HEADER = """# Acceptance

Written by `make acceptance`, which runs the tests that carry a row's mark, the long ones too; not edited by hand. Each
row says at which commit its tests ran, with a `+` where the tree had changes of its own: what has changed since is not
covered. An issue that touches a row's code makes the row anew (`--acceptance-rows`) before it is resolved. *Real* and
*simulated* are what the tests ran on. What a row does not reach is in `tests/ratchet.toml` with the reason.

| row | fault | what was tried (times) | real | simulated | tests passed | at commit | outcome |
|---|---|---|---|---|---|---|---|"""


def load_ratchet() -> dict[str, str]:
    """Known gaps: row -> what is missing and why."""
    entries = tomllib.loads(RATCHET.read_text(encoding="utf-8")).get("gap", [])
    return {entry["row"]: f"{entry['missing']} ({entry['reason']})" for entry in entries}


def _outcome(row: Row, gap: str | None) -> str:
    if row.failed:
        return "**fails**"
    if not row.passed:
        return f"not reached: {gap}" if gap else "**not tried**"
    return f"holds, except: {gap}" if gap else "holds"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--acceptance-rows", default="", help="run the tests of these rows alone; the others stay as they are"
    )
    parser.addoption("--acceptance-out", type=Path, default=None, help="write the acceptance table to this file")


def pytest_configure(config: pytest.Config) -> None:
    out = config.getoption("--acceptance-out")
    if out is None:
        return
    rows = config.getoption("--acceptance-rows")
    names = set(rows.split(",")) if rows else set(ROWS)
    config.pluginmanager.register(Selection(names, alone=bool(rows)))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(AcceptanceTable(out, names))
