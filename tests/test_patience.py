"""No test of ours fails because a machine is slow: what a test waits for has its limit in ``tests.patience``."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tools.syntax import syntax_tree

TESTS = Path(__file__).parent
WAITS = {"wait", "wait_for", "wait_procs", "join", "result", "timeout", "timeout_at", "run", "communicate"}
CLIENTS = {"Client", "AsyncClient", "stream", "get", "post", "request", "create_connection"}
ON_PURPOSE = {"tests/clients/environment.py", "tests/clients/scripts/drive_litellm.py"}
"""Other people's clients, in environments of their own, only in ``make test-clients``."""


def limits(call: ast.Call) -> Iterator[float]:
    """Seconds that a call is ready to wait, where they are written down in it."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    values = [word.value for word in call.keywords if word.arg in ("timeout", "timeout_s") and name in WAITS | CLIENTS]
    if isinstance(call.func, ast.Attribute) and name in ("wait_for", "timeout", "wait", "join", "result") and call.args:
        values.append(call.args[-1])
    for value in values:
        # Less than a second is a pause, not a limit.
        if isinstance(value, ast.Constant) and isinstance(value.value, int | float) and value.value >= 1:
            yield float(value.value)


def gives_up(loop: ast.For) -> bool:
    """A loop of so many looks with a pause behind each."""
    is_counted = isinstance(loop.iter, ast.Call) and getattr(loop.iter.func, "id", "") == "range"
    pauses = [
        node.args[0].value
        for node in ast.walk(loop)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("asyncio.sleep", "time.sleep")
        and isinstance(node.args[0], ast.Constant)
    ]
    looks = any(isinstance(node, ast.If | ast.Break | ast.Return) for node in ast.walk(loop))
    return is_counted and looks and any(pauses)


def impatient(source: str) -> list[int]:
    """Lines of what gives up before our patience does."""
    return [
        node.lineno
        for node in ast.walk(syntax_tree(source))
        if (isinstance(node, ast.For) and gives_up(node))
        or (isinstance(node, ast.Call) and any(seconds < PATIENCE_S for seconds in limits(node)))
    ]


@pytest.mark.parametrize(
    "source",
    [
        "await asyncio.wait_for(task, 5)",
        "asyncio.timeout(30)",
        "process.wait(20)",
        "thread.join(timeout=10)",
        "subprocess.run(command, timeout=60)",
        "httpx.Client(timeout=60.0)",
        "psutil.wait_procs([engine], timeout=5)",
        "for _ in range(400):\n    if done():\n        break\n    time.sleep(0.01)",
    ],
)
def test_what_gives_up_early_is_seen(source: str) -> None:
    assert impatient(source) == [1]


@pytest.mark.parametrize(
    "source",
    ["asyncio.wait_for(task, PATIENCE_S)", "','.join(words)", "event.wait()", "for _ in range(3):\n    work()"],
)
def test_what_does_not_is_left_alone(source: str) -> None:
    assert impatient(source) == []


def test_nothing_gives_up_early() -> None:
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        name = str(path.relative_to(TESTS.parent))
        if name not in ON_PURPOSE | {"tests/test_patience.py"}:
            found += [f"{name}:{line}" for line in impatient(path.read_text(encoding="utf-8"))]
    assert found == []
