"""Runs of cells under policies: each in a process of its own, kept by the code that decides it, resumable."""

import hashlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

import neaptide
from neaptide_lab.experiments.judgement.cell import Cell
from neaptide_lab.experiments.judgement.worker import Figures, Task

OURS = "neaptide"
BOUND = "bound"
"""In place of a policy: what none can exceed."""
CACHE_VARIABLE = "NEAPTIDE_CACHE"
HERE = Path(__file__).parent
ROOT = Path(neaptide.__file__).parent.parent
"""The tree of this code."""
DECIDING = (
    "neaptide/engine/**/*.py",
    "neaptide/simulation/**/*.py",
    "neaptide/estimator/**/*.py",
    "neaptide/executors/simulated/*.py",
    "neaptide/loadgen/workloads/*.py",
    "neaptide/cluster/simulation/*.py",
    "neaptide/cluster/routing.py",
    "neaptide/data/profiles/*.json",
)
"""Files that decide what a simulation of our policy gives."""
POLICIES = ("lab/neaptide_lab/policies/**/*.py",)
"""Files that decide besides what one of another policy gives."""
BOUNDING = (
    "neaptide/estimator/**/*.py",
    "neaptide/simulation/bound.py",
    "neaptide/loadgen/workloads/*.py",
    "neaptide/data/profiles/*.json",
    "lab/neaptide_lab/experiments/limits/attainment.py",
    "lab/neaptide_lab/experiments/judgement/bound.py",
)
"""Files that decide a bound."""
HARNESS = ("cell.py", "worker.py")
BOOT = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
name = "neaptide_lab.experiments.judgement"
spec = spec_from_file_location(name, sys.argv[1] + "/__init__.py", submodule_search_locations=[sys.argv[1]])
sys.modules[name] = package = module_from_spec(spec)
spec.loader.exec_module(package)
from importlib import import_module
sys.exit(import_module(f"{name}.{sys.argv[2]}").main())
"""
"""Runs a worker of this tree on the code of another one, which may not have it."""


def cache_folder() -> Path:
    """Where results are kept, if nothing else is given."""
    given = os.environ.get(CACHE_VARIABLE)
    return (Path(given) if given else Path.home() / ".cache" / "neaptide") / "judgement"


@dataclass(frozen=True)
class Tree:
    """A checkout whose code decides."""

    root: Path
    outside: str = ""
    """Digest of what decides besides, outside of the checkout: the files of somebody's policy."""

    @cached_property
    def ours(self) -> str:
        """Digest of what decides a run of our policy."""
        return self._digest(DECIDING)

    @cached_property
    def others(self) -> str:
        """Digest of what decides a run of any other policy."""
        return self._digest((*DECIDING, *POLICIES))

    @cached_property
    def bound(self) -> str:
        """Digest of what decides a bound."""
        return self._digest(BOUNDING)

    def digest(self, policy: str) -> str:
        if policy == BOUND:
            return self.bound
        is_ours = policy.partition("@")[0].removesuffix("+plan") == OURS
        return self.ours if is_ours else self.others

    def _digest(self, patterns: Iterable[str]) -> str:
        digest = hashlib.sha256()
        for path in sorted({path for pattern in patterns for path in self.root.glob(pattern)}):
            digest.update(f"{path.relative_to(self.root).as_posix()}\n".encode() + path.read_bytes())
        for name in HARNESS:
            digest.update((HERE / name).read_bytes())
        digest.update(self.outside.encode())
        return digest.hexdigest()[:16]


def tree_of(commit: str, cache: Path) -> Tree:
    """A worktree of a commit of this repository, made in the cache if it is not there.

    Raises:
        ValueError: there is no such commit.
    """
    command = ["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"no commit can be found without git: {error}") from error
    name = found.stdout.strip()
    if found.returncode:
        raise ValueError(f"there is no commit {commit!r} in {ROOT}")
    folder = cache / "trees" / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = ["git", "worktree", "add", "--quiet", "--detach", "--force", str(folder), name]
        subprocess.run(command, cwd=ROOT, check=True)
    return Tree(folder)


@dataclass(slots=True, frozen=True)
class Run:
    """A cell under a policy on the code of a tree."""

    cell: Cell
    policy: str
    tree: Tree

    @property
    def key(self) -> str:
        content = msgspec.json.encode((self.tree.digest(self.policy), self.policy, self.cell))
        return hashlib.sha256(content).hexdigest()[:32]

    @property
    def name(self) -> "RunName":
        return self.cell.name, self.policy, self.tree.root


RunName = tuple[str, str, Path]


class Failed(msgspec.Struct):
    """A run that gave no figures."""

    reason: str


Outcome = Figures | Failed


class Kept(msgspec.Struct):
    """A file of the cache."""

    cell: str
    policy: str
    code: str
    figures: Figures


class Runner:
    """
    Args:
        cache: the folder of results.
        jobs: simulations at a time.
        say: told each result as it comes.
        simulate: runs one; replaced in tests.
    """

    def __init__(
        self,
        cache: Path,
        jobs: int = 1,
        say: Callable[[str], None] = print,
        simulate: Callable[[Run], Outcome] | None = None,
    ) -> None:
        self._cache, self._jobs, self._say = cache, jobs, say
        self._simulate = in_a_process if simulate is None else simulate
        self._lock = threading.Lock()
        self.num_run = 0
        """Simulations that were not found in the cache."""

    def run(self, runs: Sequence[Run]) -> dict[RunName, Outcome]:
        """The outcomes by name of the cell, policy and tree. What is not kept is run; a failure is not kept."""
        found: dict[RunName, Outcome] = {}
        missing: dict[str, list[Run]] = {}
        for run in runs:
            kept = self.kept(run)
            if kept is not None:
                found[run.name] = kept
            else:
                missing.setdefault(run.key, []).append(run)
        with ThreadPoolExecutor(self._jobs) as pool:
            futures = {pool.submit(self._one, same[0]): same for same in missing.values()}
            try:
                for number, future in enumerate(as_completed(futures), 1):
                    outcome = future.result()
                    found |= {run.name: outcome for run in futures[future]}
                    self._say(f"{number}/{len(futures)} {_line(futures[future][0], outcome)}")
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)
                raise
        return found

    def kept(self, run: Run) -> Figures | None:
        try:
            return msgspec.json.decode(self._path(run).read_bytes(), type=Kept).figures
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def _one(self, run: Run) -> Outcome:
        kept = self.kept(run)  # another process may have run it meanwhile
        if kept is not None:
            return kept
        outcome = self._simulate(run)
        with self._lock:
            self.num_run += 1
        if isinstance(outcome, Figures):
            path = self._path(run)
            path.parent.mkdir(parents=True, exist_ok=True)
            written = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
            written.write_bytes(
                msgspec.json.encode(Kept(run.cell.name, run.policy, run.tree.digest(run.policy), outcome))
            )
            written.replace(path)
        return outcome

    def _path(self, run: Run) -> Path:
        return self._cache / "runs" / f"{run.key}.json"


def _line(run: Run, outcome: Outcome) -> str:
    head = f"{run.cell.name} | {run.policy}"
    if isinstance(outcome, Failed):
        return f"{head}: FAILED {outcome.reason}"
    share = "-" if outcome.attained is None else f"{100 * outcome.attained:.1f}%"
    return f"{head}: {share} of {outcome.requests}, {outcome.offline_tokens_per_s:,.0f} tok/s, {outcome.wall_s:.0f} s"


def _place(lines: Sequence[str], folder: Path | None) -> str:
    """The last line of a traceback that is in a file directly in the folder of a policy."""
    frames = [re.match(r'  File "(.+)", line (\d+)', line) for line in lines]
    places = [(Path(frame[1]), frame[2]) for frame in frames if frame is not None]
    own = [(path, number) for path, number in places if folder is not None and path.parent == folder.resolve()]
    return f" ({own[-1][0].name}, line {own[-1][1]})" if own else ""


def in_a_process(run: Run, *, with_bounds: bool = False, folder: Path | None = None) -> Outcome:
    """Simulates in a process of its own, with the code of the run's tree.

    Args:
        with_bounds: compute the bound on offline work, too.
        folder: the working directory, where a policy's module may lie; the tree's root by default. It is searched
            after all other places.
    """
    path = os.pathsep.join((str(run.tree.root), str(run.tree.root / "lab")))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", BOOT, str(HERE), "bound" if run.policy == BOUND else "worker"],
        input=msgspec.json.encode(Task(run.cell, run.policy, with_bounds)),
        cwd=folder or run.tree.root,
        env=environment,
        capture_output=True,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return Failed(lines[-1] + _place(lines, folder) if lines else f"exit status {done.returncode}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Figures)
