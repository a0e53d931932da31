"""The acceptance table: which fault was tried, how often, and what came of it, written by the tests themselves.

A test says what it shows with ``@pytest.mark.acceptance("A12", "clients that leave early", count=2000)``;
``pytest --acceptance-out=FILE`` writes the table; with ``--acceptance-rows=A5,A12`` it runs the tests of these rows and
replaces their lines. Rows that are not reached stand in ``ratchet.toml``.
"""

import tomllib
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

RATCHET = Path(__file__).with_name("ratchet.toml")
ROWS = {
    "A1": "`kill -9` of any process at any system call while a batch runs",
    "A2": "engine killed in the middle of streams",
    "A3": "a batch line that kills the engine twice",
    "A4": "an exception from one request in plan, prepare, model, sampler or detokenizer",
    "A5": "an engine that hangs",
    "A6": "NaN or infinite logits in one row",
    "A7": "KV cache exhausted, ten times over-admitted",
    "A8": "disk full during result, finalize, upload, log",
    "A9": "I/O errors on write and fsync",
    "A10": "damaged database, log or file at start",
    "A11": "database locked, data directory or port in use",
    "A12": "clients that leave before or during the answer",
    "A13": "readers that are too slow",
    "A14": "slow headers, slow bodies, silent sockets",
    "A15": "more streams than the server admits",
    "A16": "SIGTERM, also to the group, also twice, in the middle of a batch",
    "A17": "SIGKILL of the API process alone",
    "A18": "torn, oversized and malformed uploads",
    "A19": "a batch created twice by a client that retries",
    "A20": "cancel in every phase",
    "A21": "clock jumps while a batch runs",
    "A22": "another model after a restart",
    "A23": "JSON at its edges",
    "A24": "parameters at their edges, online and in a batch line",
    "A25": "hostile schemas and grammars",
    "A26": "text made to be slow to tokenize",
    "A27": "every route by key, tenant, path, host and method",
    "A28": "secrets in prompts, keys, names and headers",
}


@dataclass
class Row:
    tried: dict[str, int] = field(default_factory=dict)
    """What was tried, and how often; tests of one description add up."""
    passed: int = 0
    failed: int = 0


class AcceptanceTable:
    """Counts the outcomes of marked tests; a pytest plugin."""

    def __init__(self, out: Path, names: set[str]) -> None:
        self._out = out
        self._rows = {name: Row() for name in ROWS if name in names}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        wanted = [any(mark.args[0] in self._rows for mark in item.iter_markers("acceptance")) for item in items]
        config.hook.pytest_deselected(items=[item for item, wants in zip(items, wanted, strict=True) if not wants])
        items[:] = [item for item, wants in zip(items, wanted, strict=True) if wants]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "call" or report.failed:
            for mark in item.iter_markers("acceptance"):
                self._count(mark, report)
        return report

    def _count(self, mark: pytest.Mark, report: pytest.TestReport) -> None:
        name, tried = mark.args
        row = self._rows.get(name)
        if row is None:
            return
        if report.passed:
            row.passed += 1
            row.tried[tried] = row.tried.get(tried, 0) + int(mark.kwargs.get("count", 1))
        elif report.failed:
            row.failed += 1

    def pytest_sessionfinish(self) -> None:
        gaps = load_ratchet()
        known = self._known_lines()
        lines = ["| row | fault | what was tried (times) | tests passed | outcome |", "|---|---|---|---|---|"]
        for name, fault in ROWS.items():
            row = self._rows.get(name)
            if row is None:
                lines.append(known[name])
                continue
            tried = "; ".join(f"{what} ({times:,})" for what, times in sorted(row.tried.items())) or "-"
            passed = f"{row.passed} of {row.passed + row.failed}"
            lines.append(f"| {name} | {fault} | {tried} | {passed} | {_outcome(row, gaps.get(name))} |")
        self._out.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")

    def _known_lines(self) -> dict[str, str]:
        text = self._out.read_text(encoding="utf-8") if self._out.exists() else ""
        return {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| A")}


HEADER = """# Acceptance

Written by `make acceptance`, which runs the tests that carry a row's mark, the long ones too; not edited by hand.
What a row does not reach is in `tests/ratchet.toml` with the reason.

"""


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
    parser.addoption("--acceptance-rows", default=",".join(ROWS), help="only these rows, the others stay as they are")
    parser.addoption("--acceptance-out", type=Path, default=None, help="write the acceptance table to this file")


def pytest_configure(config: pytest.Config) -> None:
    out = config.getoption("--acceptance-out")
    if out is not None:
        config.pluginmanager.register(AcceptanceTable(out, set(config.getoption("--acceptance-rows").split(","))))
