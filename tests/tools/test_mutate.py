"""The mutation tool on a small tree of its own; and the set that it comes with."""

import subprocess
from pathlib import Path

import pytest

from tools.mutate import Mutation, MutationError, check, load_mutations, survivors

CODE = "LIMIT = 3\n\n\ndef is_small(x: int) -> bool:\n    return x < LIMIT and x >= 0\n"
TEST = "from code_under_test import is_small\n\ndef test_it():\n    assert is_small(2) and not is_small(3)\n"
FILE, TESTS = "code_under_test.py", ("test_code.py",)
DIES = Mutation(FILE, "x < LIMIT", "x <= LIMIT", TESTS)
SURVIVES = Mutation(FILE, "x >= 0", "x >= -1", TESTS)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # these tests need none of them
    (tmp_path / FILE).write_text(CODE)
    (tmp_path / "test_code.py").write_text(TEST)
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q"], check=True)
    return tmp_path


def test_what_no_test_notices_survives_and_the_tree_itself_is_never_touched(tree: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in tree.iterdir()}
    broken = Mutation(FILE, "def is_small", "def is_smaller", TESTS)
    assert survivors([DIES, SURVIVES, broken], tree, jobs=2) == [SURVIVES]
    assert {path: path.stat().st_mtime_ns for path in tree.iterdir()} == before
    assert (tree / FILE).read_text() == CODE


def test_tests_that_fail_anyway_prove_nothing(tree: Path) -> None:
    (tree / "test_code.py").write_text("def test_it():\n    assert False\n")
    with pytest.raises(MutationError, match="fail without a mutation"):
        survivors([DIES], tree)


@pytest.mark.parametrize(
    ("mutation", "reason"),
    [
        (Mutation("nowhere.py", "a", "b", TESTS), "no such file"),
        (Mutation(FILE, "x < LIMIT", "x <= LIMIT", ("test_other.py",)), "there is no test_other.py"),
        (Mutation(FILE, "x < LIMIT", "x <= LIMIT", ()), "names no tests"),
        (Mutation(FILE, "x > LIMIT", "x <= LIMIT", TESTS), "0 times"),
        (Mutation(FILE, "LIMIT", "BOUND", TESTS), "2 times"),
        (Mutation(FILE, "x < LIMIT", "x <", TESTS), "not valid Python"),
        (Mutation(FILE, "x < LIMIT", "(x < LIMIT)", TESTS), "changes nothing"),
    ],
)
def test_a_mutation_that_does_not_fit_is_an_error(tree: Path, mutation: Mutation, reason: str) -> None:
    (problem,) = check([mutation], tree)
    assert reason in problem
    with pytest.raises(MutationError, match=reason):
        survivors([mutation], tree)


@pytest.mark.parametrize(
    "entry", ['file = "a"\nold = "b"\nnew = "c"', 'file = "a"\nold = "b"\nnew = "c"\ntests = []\nx = 1']
)
def test_an_entry_has_four_fields(tmp_path: Path, entry: str) -> None:
    (tmp_path / "set.toml").write_text(f"[[mutation]]\n{entry}\n")
    with pytest.raises(MutationError, match=r"set\.toml"):
        load_mutations(tmp_path)


def test_every_mutation_of_the_set_can_be_made() -> None:
    mutations = load_mutations()
    assert len(mutations) >= 100
    assert check(mutations) == []
