"""What other packages bring: how it is found, and what is said of what cannot be used."""

import sys
from pathlib import Path

import pytest

from neaptide.engine import extensions
from neaptide.engine.config import SchedulerConfig
from neaptide.engine.extensions import ExtensionError
from neaptide.engine.scheduler.policies import POLICIES, check_name, find_policy
from neaptide.policy import Draft, Scheduler
from tests.engine.harness import Harness

POLICY = """
from neaptide.policy import Draft, Scheduler

class Idle(Scheduler):
    def pack(self, draft: Draft) -> float:
        return 0.0
"""


def installed(directory: Path, name: str, text: str, entry_points: str = "") -> None:
    """A module, and where it has entry points, as an installed package."""
    (directory / f"{name}.py").write_text(text)
    if entry_points:
        info = directory / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)


def test_a_policy_goes_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "brought", POLICY, "[neaptide.policies]\nbrought-idle = brought:Idle\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_policy("brought-idle").__name__ == "Idle"
    check_name("brought-idle")


def test_a_policy_in_the_working_directory_is_found_after_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, "from_here", POLICY)
    installed(tmp_path, "msgspec", "raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    assert find_policy("from_here:Idle").__module__ == "from_here"
    with pytest.raises(ExtensionError, match="the module msgspec has no 'Idle'"):
        find_policy("msgspec:Idle")


def test_none_of_them_takes_the_name_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "taking", POLICY, "[neaptide.policies]\nfcfs = taking:Idle\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_policy("fcfs") is POLICIES["fcfs"]


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("import nothing_like_it\n", "A", r"ModuleNotFoundError: No module named 'nothing_like_it' \(.*line 1\)"),
        ("class A(:\n", "A", r"SyntaxError: .*line 1"),
        ("A = 1\n\nundefined\n", "A", r"NameError: name 'undefined' is not defined \(.*line 3\)"),
        ("raise SystemExit('leaving')\n", "A", r"SystemExit: leaving \(.*line 1\)"),
        ("A = 1\n", "B", r"the module \w+ has no 'B'"),
        ("A = 1\n", "A", r"is no class derived from neaptide.policy.Scheduler"),
        ("from neaptide.policy import Scheduler\nclass A(Scheduler): pass\n", "A", "lacks pack"),
        ("A = 1\n", "", "is not of the form module:Name"),
    ],
)
def test_what_is_wrong_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str, said: str
) -> None:
    module = f"{tmp_path.name}_wrong".replace("-", "_")
    installed(tmp_path, module, text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ExtensionError, match=said) as refused:
        find_policy(f"{module}:{name}")
    assert "\n" not in str(refused.value)


def test_an_unknown_name_is_refused_with_the_list() -> None:
    for refuse in (find_policy, check_name):
        with pytest.raises(ExtensionError, match=r"there is no policy 'best'; there are: .*fcfs, .*neaptide"):
            refuse("best")


def test_a_path_is_not_imported_to_check_its_name() -> None:
    check_name("nothing_like_it:Policy")


class Failing(Scheduler):
    def __init__(self, config: SchedulerConfig, *others: object) -> None:
        raise KeyError("missing")

    def pack(self, draft: Draft) -> float:
        return 0.0


def test_a_policy_that_cannot_be_set_up_says_where() -> None:
    with pytest.raises(ExtensionError, match=r"Failing' cannot be set up: KeyError: 'missing' \(.*test_extensions.py"):
        Harness(policy="tests.engine.test_extensions:Failing")


def test_our_own_policies_need_no_look_at_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that starts with one of them imports nothing of another package."""

    def looked(**selection: str) -> None:
        raise AssertionError(f"looked for {selection}")

    monkeypatch.setattr(extensions, "entry_points", looked)
    for name in POLICIES:
        check_name(name)
        assert find_policy(name) is POLICIES[name]
