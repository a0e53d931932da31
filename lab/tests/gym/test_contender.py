"""Policies that are brought to the gym."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from neaptide_lab.gym.contender import Contender, contender

POLICY = """
from neaptide.policy import Draft, Scheduler

class {name}(Scheduler):
    def pack(self, draft: Draft) -> float:
        return 1.0
"""


@pytest.fixture(autouse=True)
def _forgotten(tmp_path: Path) -> Iterator[None]:
    """Modules and search paths of a test are gone after it."""
    paths, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = paths
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def written(folder: Path, module: str, *names: str, more: str = "") -> Path:
    path = folder / f"{module}.py"
    path.write_text("".join(POLICY.format(name=name) for name in names) + more)
    return path


def test_the_only_policy_of_a_file_needs_no_name(tmp_path: Path) -> None:
    path = written(tmp_path, "gym_only", "Mine", more="class Other: ...\n")
    found = contender(str(path))
    assert (found.policy, found.folder) == ("gym_only:Mine", tmp_path)
    assert found.digest


def test_a_policy_may_be_named_and_have_limits(tmp_path: Path) -> None:
    path = written(tmp_path, "gym_two", "One", "Two")
    assert contender(f"{path}:Two@1024x256").policy == "gym_two:Two@1024x256"
    with pytest.raises(ValueError, match=r"has several policies: name one, as .*gym_two\.py:One"):
        contender(str(path))


def test_a_file_of_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "gym_here", "Mine")
    assert contender("gym_here.py").policy == "gym_here:Mine"
    assert contender("gym_here:Mine").folder == tmp_path


def test_what_came_with_neaptide_has_no_digest_of_its_own() -> None:
    assert contender("qoserve") == Contender("qoserve", Path.cwd(), "")
    assert contender("fcfs@512").digest == ""


def test_the_digest_is_of_the_file_and_of_its_neighbours(tmp_path: Path) -> None:
    digests = []
    for number, (own, neighbour) in enumerate((("", ""), ("# changed\n", ""), ("", "# changed\n"), ("", ""))):
        folder = tmp_path / str(number)
        folder.mkdir()
        written(folder, "gym_helper", more=f"VALUE = 1\n{neighbour}")
        path = written(folder, "gym_digest", "Mine", more=f"import gym_helper\n{own}")
        digests.append(contender(str(path)).digest)
        for name in ("gym_helper", "gym_digest"):
            del sys.modules[name]
        sys.path.remove(str(folder))
        _load_again()
    assert digests[0] == digests[3]
    assert len(set(digests)) == 3


def _load_again() -> None:
    from neaptide.engine import extensions

    extensions.load.cache_clear()


@pytest.mark.parametrize(
    ("module", "content", "message"),
    [
        ("gym_none", "VALUE = 1\n", r"has no class derived from neaptide\.policy\.Scheduler"),
        ("gym_wrong", "def (\n", r"cannot be loaded: SyntaxError"),
        ("gym_raises", "1 / 0\n", r"cannot be loaded: ZeroDivisionError.*line 1"),
        ("gym-dash", "", r"give it a name of letters"),
        ("json", "", r"has the name of another module"),
        (
            "gym_lacks",
            "from neaptide.policy import Scheduler\nclass Mine(Scheduler): ...\n",
            r"lacks pack",
        ),
    ],
)
def test_what_cannot_be_used_is_said_in_a_line(module: str, content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / f"{module}.py"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        contender(str(path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.py", "nowhere.py: no such file"),
        ("no-such-policy", "there is no policy 'no-such-policy'"),
        ("fcfs,priority", "one policy at a time"),
        ("fcfs@0", "must be at least 1"),
    ],
)
def test_what_is_not_there_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        contender(text)
