"""Runs that are kept, and those that are made again."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lab.tests.experiments.judgement.runs_by_hand import cell, figures
from neaptide_lab.experiments.judgement.cell import Part
from neaptide_lab.experiments.judgement.runs import (
    BOUND,
    ROOT,
    Failed,
    Outcome,
    Run,
    Runner,
    Tree,
    in_a_process,
    tree_of,
)
from neaptide_lab.experiments.judgement.worker import Figures


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A tree with a policy of ours and one of others."""
    for name in ("neaptide/engine/scheduler/judgement.py", "lab/neaptide_lab/policies/bros.py", "docs/page.md"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True)
        path.write_text("first")
    return Tree(tmp_path / "tree")


def runner(cache: Path, simulate: Callable[[Run], Outcome]) -> Runner:
    return Runner(cache, jobs=2, say=lambda line: None, simulate=simulate)


def not_to_be_run(run: Run) -> Outcome:
    raise AssertionError("it was kept")


def test_what_was_run_is_kept_for_the_same_cell_policy_and_code(tmp_path: Path, tree: Tree) -> None:
    runs = [Run(cell(name), policy, tree) for name in "ab" for policy in ("neaptide", "neaptide@512")]
    given = {run.name: figures(steps=number) for number, run in enumerate(runs)}
    first = runner(tmp_path / "cache", lambda run: given[run.name])
    assert first.run(runs) == given
    assert first.num_run == 4
    assert runner(tmp_path / "cache", not_to_be_run).run(runs) == given


def test_another_seed_is_another_cell(tmp_path: Path, tree: Tree) -> None:
    assert Run(cell(seed=0), "neaptide", tree).key != Run(cell(seed=1), "neaptide", tree).key


@pytest.mark.parametrize(
    ("changed", "ours_differs", "others_differ"),
    [
        ("neaptide/engine/scheduler/judgement.py", True, True),
        ("lab/neaptide_lab/policies/bros.py", False, True),
        ("docs/page.md", False, False),
    ],
)
def test_a_run_is_kept_by_the_code_that_decides_it(
    tree: Tree, changed: str, ours_differs: bool, others_differ: bool
) -> None:
    ours, others = (Run(cell(), policy, tree).key for policy in ("neaptide@512", "bros"))
    (tree.root / changed).write_text("second")
    again = Tree(tree.root)
    assert (Run(cell(), "neaptide@512", again).key != ours) is ours_differs
    assert (Run(cell(), "bros", again).key != others) is others_differ


def test_trees_with_the_same_code_are_run_once(tmp_path: Path, tree: Tree) -> None:
    copy = tmp_path / "copy"
    (tree.root).rename(copy)
    twice = [Run(cell(), "neaptide", Tree(copy)), Run(cell(), "neaptide", Tree(copy / ".." / "copy"))]
    one = runner(tmp_path / "cache", lambda run: figures())
    assert len(one.run(twice)) == 2
    assert one.num_run == 1


def test_a_failure_is_said_and_run_again(tmp_path: Path, tree: Tree) -> None:
    run = Run(cell(), "neaptide", tree)
    assert runner(tmp_path / "cache", lambda run: Failed("stuck")).run([run]) == {run.name: Failed("stuck")}
    assert runner(tmp_path / "cache", lambda run: figures()).run([run]) == {run.name: figures()}


def test_half_a_file_is_run_again(tmp_path: Path, tree: Tree) -> None:
    run = Run(cell(), "neaptide", tree)
    runner(tmp_path / "cache", lambda run: figures()).run([run])
    (file,) = (tmp_path / "cache" / "runs").iterdir()
    file.write_bytes(file.read_bytes()[:40])
    assert runner(tmp_path / "cache", lambda run: figures(steps=7)).run([run]) == {run.name: figures(steps=7)}


def test_a_run_is_simulated_by_the_code_of_its_tree() -> None:
    outcome = in_a_process(Run(cell(offline="fixed-32-4"), "neaptide@256", Tree(ROOT)))
    assert isinstance(outcome, Figures)
    assert outcome.requests > 0
    assert outcome.attained == 1.0
    assert outcome.offline_tokens_per_s > 0.0


def test_of_a_run_that_cannot_be_the_reason_is_said() -> None:
    outcome = in_a_process(Run(cell(), "no-such-policy", Tree(ROOT)))
    assert isinstance(outcome, Failed)
    assert "no-such-policy" in outcome.reason


def test_a_commit_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no commit 'nothing'"):
        tree_of("nothing", tmp_path)


def test_a_bound_is_at_least_what_a_policy_attains_and_is_kept_by_what_decides_it(tree: Tree) -> None:
    one = cell(offline="fixed-32-4", online=(Part("fixed-512-8", (0.0, 2.0), rate_rps=4.0),))
    bound, ours = (in_a_process(Run(one, policy, Tree(ROOT))) for policy in (BOUND, "neaptide"))
    assert isinstance(bound, Figures)
    assert isinstance(ours, Figures)
    assert bound.requests == ours.requests
    assert (ours.attained or 0.0) <= (bound.attained or 0.0)
    assert 0.0 < ours.offline_tokens_per_s <= bound.offline_tokens_per_s
    key = Run(one, BOUND, tree).key
    (tree.root / "neaptide/engine/scheduler/judgement.py").write_text("second")
    assert Run(one, BOUND, Tree(tree.root)).key == key
