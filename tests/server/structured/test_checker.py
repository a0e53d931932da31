"""Grammars are compiled in a process that may be killed: a hostile one costs its own caller a 400."""

import errno
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from unittest.mock import Mock

import psutil
import pytest

from neaptide.launch.serve import embedded_model_path
from neaptide.server.structured.checker import TOO_LONG, CheckerBusyError, GrammarChecker, NoGrammarsError
from neaptide.server.subprocesses.frames import read_frame
from tests.patience import until_here

SLOW = f"start: /{'a?' * 10_000}/"
"""It takes the compiler more than a second on any machine: the square of its length."""


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker(embedded_model_path(), 416, [5])
    yield made
    made.close()


def test_verdicts_and_that_they_are_kept(checker: GrammarChecker) -> None:
    assert checker.pid is None
    assert checker.complaint('start: "a"') == ""
    assert "start" in checker.complaint('begin: "a"')
    pid = checker.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert checker.complaint('start: "a"') == ""  # nobody is asked


def test_a_grammar_that_takes_too_long_ends_the_child_and_the_next_one_finds_another() -> None:
    checker = GrammarChecker(embedded_model_path(), 416, [5], cpu_s=0.01)
    try:
        assert checker.complaint('start: "a"') == ""
        first = checker.pid
        assert checker.complaint(SLOW) == TOO_LONG
        assert checker.pid is None
        assert first is not None
        assert not psutil.pid_exists(first)
        assert checker.complaint('start: "b"') == ""
    finally:
        checker.close()


def test_a_child_that_was_killed_between_two_grammars_is_replaced(checker: GrammarChecker) -> None:
    assert checker.complaint('start: "a"') == ""
    assert checker.pid is not None
    child = psutil.Process(checker.pid)
    child.kill()
    psutil.wait_procs([child])
    assert checker.complaint('start: "b"') == ""


def stopped_in(checker: GrammarChecker, grammar: str, found: list[object]) -> tuple[psutil.Process, threading.Thread]:
    """The child, which does not answer, and a thread that waits for what it says of the grammar."""
    assert checker.complaint('start: "a"') == ""
    child = psutil.Process(checker.pid)
    child.suspend()

    def ask() -> None:
        try:
            found.append(checker.complaint(grammar))
        except CheckerBusyError as error:
            found.append(type(error))

    asked = threading.Event()

    def read_when_asked(stream: BinaryIO) -> bytes | None:
        asked.set()
        return read_frame(stream)

    asking = threading.Thread(target=ask)
    with pytest.MonkeyPatch.context() as patch:
        # A child that is killed before it was asked is only replaced.
        patch.setattr("neaptide.server.structured.checker.read_frame", read_when_asked)
        asking.start()
        until_here(asked.is_set)
    return child, asking


def test_a_child_that_is_killed_says_nothing_of_its_grammar(checker: GrammarChecker) -> None:
    found: list[object] = []
    child, asking = stopped_in(checker, 'start: "b"', found)
    child.kill()
    asking.join()
    assert found == [CheckerBusyError]
    assert checker.known('start: "b"') is None
    assert checker.complaint('start: "b"') == ""


def test_what_is_known_does_not_wait_for_what_is_being_compiled(checker: GrammarChecker) -> None:
    found: list[object] = []
    child, asking = stopped_in(checker, 'start: "b"', found)
    try:
        assert checker.complaint('start: "a"') == ""
        assert not found
    finally:
        child.resume()
        asking.join()
    assert found == [""]


def test_a_child_that_cannot_be_started_says_nothing_either(
    checker: GrammarChecker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("subprocess.Popen", refuse := Mock(side_effect=OSError(errno.ENOMEM, "no memory")))
    with pytest.raises(CheckerBusyError):
        checker.complaint('start: "a"')
    assert refuse.called
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "grammar",
    [
        "start: /" + "(" * 20_000 + "a" + ")" * 20_000 + "/",
        "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
        "start: /(?<=x)*/",
        SLOW,
        "",
        "start: start",
        "start: a\na: b\nb: a",
        "\0",
    ],
)
@pytest.mark.acceptance("A25", "hostile expressions and grammars, compiled in the child")
def test_hostile_grammars_are_complaints(checker: GrammarChecker, grammar: str) -> None:
    assert checker.complaint(grammar)
    assert checker.complaint('start: "after"') == ""


def test_a_model_whose_tokenizer_cannot_be_used_serves_none() -> None:
    checker = GrammarChecker(embedded_model_path().parent, 416, [5])
    with pytest.raises(NoGrammarsError):
        checker.complaint('start: "a"')
    with pytest.raises(NoGrammarsError):
        checker.complaint('start: "a"')


def test_nothing_is_left_behind() -> None:
    checker = GrammarChecker(embedded_model_path(), 416, [5])
    checker.complaint('start: "a"')
    pid = checker.pid
    del checker
    assert pid is not None
    assert not psutil.pid_exists(pid)
