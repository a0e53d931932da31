"""Makes small mistakes in the code, one after the other, and reports those that no test finds.

    python -m tools.mutate                      # all of them
    python -m tools.mutate --only conformal     # those in files of that name
    python -m tools.mutate --check              # only whether every mutation can be made

The mistakes are listed in ``tools/mutations/*.toml``:

    [[mutation]]
    file = "neaptide/estimator/cost/conformal.py"
    old = "MIN_LEVEL = -0.25"
    new = "MIN_LEVEL = -2.5"
    tests = ["tests/estimator/cost/test_online_fit.py"]

``old`` occurs in the file exactly once, and ``tests`` are the files that should fail once ``new`` replaces it. A
mutation whose text is not found is an error, not a survivor: a change of that line must change its entry too. The
working tree is never touched; everything happens in temporary copies of it. The last line printed is JSON.
"""

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from tools.syntax import syntax_tree

ROOT = Path(__file__).parents[1]
MUTATIONS = Path(__file__).with_name("mutations")
ALLOWED_SHARE = 0.05
"""Largest fraction of mutations that may survive."""
TIMEOUT_S = 300.0
"""Finds mutations that make the tests run for ever."""
FIELDS = {"file", "old", "new", "tests"}
NO_FAILURE, FAILURES, INTERRUPTED = 0, 1, 2
"""pytest's exit codes; a module that can no longer be imported interrupts it."""


class MutationError(Exception):
    """The mutations do not fit the tree, or the tests fail without any mutation."""


@dataclass(slots=True, frozen=True)
class Mutation:
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {' '.join(self.old.split())!r} -> {' '.join(self.new.split())!r}"

    def applied(self, tree: Path) -> str:
        """The file's text with the mutation.

        Raises:
            MutationError: the mutation cannot be made, or changes nothing.
        """
        path = tree / self.file
        if not path.is_file():
            raise MutationError(f"{self}: there is no such file")
        if not self.tests:
            raise MutationError(f"{self}: it names no tests")
        if missing := [test for test in self.tests if not (tree / test).exists()]:
            raise MutationError(f"{self}: there is no {', '.join(missing)}")
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise MutationError(f"{self}: the text occurs {count} times, not once")
        changed = text.replace(self.old, self.new)
        try:
            same = ast.dump(syntax_tree(changed)) == ast.dump(syntax_tree(text))
        except SyntaxError as error:
            raise MutationError(f"{self}: not valid Python any more: {error}") from error
        if same:
            raise MutationError(f"{self}: this changes nothing")
        return changed


def load_mutations(directory: Path = MUTATIONS, only: str = "") -> list[Mutation]:
    """Loads the mutations.

    Raises:
        MutationError: an entry is incomplete or duplicated.
    """
    found: list[Mutation] = []
    for path in sorted(directory.glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("mutation", []):
            if entry.keys() != FIELDS:
                raise MutationError(f"{path.name}: an entry has {sorted(entry)}, not {sorted(FIELDS)}")
            found.append(Mutation(entry["file"], entry["old"], entry["new"], tuple(entry["tests"])))
    if len(set(found)) < len(found):
        raise MutationError(f"{len(found) - len(set(found))} entries are duplicates")
    return [mutation for mutation in found if only in mutation.file]


def check(mutations: Sequence[Mutation], tree: Path = ROOT) -> list[str]:
    """The reasons why mutations cannot be made, one line each."""
    return list(_problems(mutations, tree))


def _problems(mutations: Sequence[Mutation], tree: Path) -> Iterator[str]:
    for mutation in mutations:
        try:
            mutation.applied(tree)
        except MutationError as error:
            yield str(error)


def copy_tree(source: Path, target: Path) -> None:
    """Copies the files that git tracks or would add."""
    command = ["git", "-C", str(source), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


def run_tests(tree: Path, tests: Sequence[str], timeout_s: float | None = None) -> int:
    """pytest's exit status. A run that does not end counts as failed.

    Raises:
        MutationError: pytest could not run the tests.
    """
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore::pytest.PytestConfigWarning"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(tree), str(tree / "lab"))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return FAILURES
    if done.returncode not in (NO_FAILURE, FAILURES, INTERRUPTED):
        raise MutationError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode


def survivors(mutations: Sequence[Mutation], source: Path = ROOT, jobs: int = 1) -> list[Mutation]:
    """The mutations that no test notices.

    Raises:
        MutationError: a mutation cannot be made, or the tests fail without any.
    """
    if problems := check(mutations, source):
        raise MutationError("\n".join(problems))
    with TemporaryDirectory(prefix="neaptide-mutants-") as name:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            tree = Path(name) / str(number)
            copy_tree(source, tree)
            trees.put(tree)
        every_test = sorted({test for mutation in mutations for test in mutation.tests})
        first = trees.get()
        if run_tests(first, every_test) != NO_FAILURE:
            raise MutationError(f"the tests fail without a mutation: {' '.join(every_test)}")
        trees.put(first)

        def survives(mutation: Mutation) -> bool:
            tree = trees.get()
            try:
                return _survives(mutation, tree)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(jobs) as pool:
            outcomes = list(pool.map(survives, mutations))
    return [mutation for mutation, survived in zip(mutations, outcomes, strict=True) if survived]


def _survives(mutation: Mutation, tree: Path) -> bool:
    path = tree / mutation.file
    original = path.read_text(encoding="utf-8")
    path.write_text(mutation.applied(tree), encoding="utf-8")
    try:
        survived = run_tests(tree, mutation.tests, TIMEOUT_S) == NO_FAILURE
    finally:
        path.write_text(original, encoding="utf-8")
    print(f"{'SURVIVES' if survived else 'dies    '} {mutation}", flush=True)
    return survived


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutate", description="Finds small mistakes that no test notices."
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only mutations of files whose path contains this text"
    )
    parser.add_argument("--check", action="store_true", help="only check that every mutation can be made")
    parser.add_argument("--jobs", type=int, default=2, help="mutations tested in parallel, each in its own copy")
    args = parser.parse_args(arguments)
    try:
        mutations = load_mutations(only=args.only)
        if args.check:
            problems = check(mutations)
            print("\n".join(problems) or f"{len(mutations)} mutations can be made")
            return 2 if problems else 0
        survived = survivors(mutations, jobs=args.jobs)
    except MutationError as error:
        print(error, file=sys.stderr)
        return 2
    share = len(survived) / max(len(mutations), 1)
    print(f"{len(survived)} of {len(mutations)} survive ({share:.1%}, allowed {ALLOWED_SHARE:.0%})")
    for mutation in survived:
        print(f"  {mutation}")
    print(json.dumps({"mutations": len(mutations), "survived": len(survived), "survivors": list(map(str, survived))}))
    return 0 if share <= ALLOWED_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
