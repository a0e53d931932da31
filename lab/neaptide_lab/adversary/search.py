"""The search for a case that breaks a promise: random cases, and changes of those that came nearest."""

import functools
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from neaptide_lab.adversary.case import PROFILES, SEATS, Case
from neaptide_lab.adversary.drawing import SLOW_STEP_S, machine_of, mutated, random_case, tightened
from neaptide_lab.adversary.promises import PROMISES, Breach
from neaptide_lab.adversary.runs import Outcome, TooLong, simulate_case

FRESH_SHARE = 0.3
"""Fraction of the tries that begin anew."""
TIGHTENED_SHARE = 0.4
"""Fraction of the changed cases whose targets become what can just be reached."""
FIRST_TRIES = 24
"""Tries before the first change of an earlier one."""
ELITE = 3
"""Cases of a niche that are changed further."""
BATCH = 4
"""Tries that are drawn before the first of them is judged, so that the order of draws is the same for any number of
processes."""
CACHED_RUNS = 512
IMPOSSIBLE = Breach(-math.inf, "too long, or does not fit")

Judge = Callable[[Case], Breach]
OnProgress = Callable[[str], None]


@functools.lru_cache(CACHED_RUNS)
def _simulated(case: Case, policy: str, cap_tokens: int | None) -> Outcome:
    return simulate_case(case, policy, cap_tokens)


def judged(promise: str, policy: str, case: Case, siblings: int = 1) -> Breach:
    """The mean breach of the case and its siblings. A case that cannot be simulated breaks nothing."""
    found, failures = PROMISES[promise], list[str]()

    def simulate(case: Case, policy: str, cap_tokens: int | None) -> Outcome:
        outcome = _simulated(case, policy, cap_tokens)
        if outcome.failure is not None:
            failures.append(outcome.failure)
        return outcome

    if not found.applies(case):
        return IMPOSSIBLE
    try:
        breaches = [found.measure(case.sibling(number), policy, simulate) for number in range(siblings)]
    except (TooLong, ValueError):
        return IMPOSSIBLE
    amount = sum(breach.amount for breach in breaches) / siblings
    hint = sum(breach.hint for breach in breaches) / siblings
    failure = failures[0] if failures else None
    return Breach(amount, breaches[0].text, hint, breaches[0].reached, failure)


def confirmed(promise: str, policy: str, case: Case) -> Breach:
    """The breach; one that the promise's siblings do not confirm on average is none."""
    breach = judged(promise, policy, case)
    siblings = PROMISES[promise].siblings
    return judged(promise, policy, case, siblings) if breach.is_broken and siblings > 1 else breach


@dataclass(slots=True, frozen=True)
class Budget:
    """When a search ends: whichever comes first. Only a limit of tries gives the same result on every machine."""

    seconds_s: float = math.inf
    tries: int | None = None


@dataclass(slots=True, frozen=True)
class Tried:
    """A case and its breach."""

    case: Case
    breach: Breach


KINDS = ("slow machine", "conversations", "wrong costs", "little memory")


def niche_of(case: Case) -> str:
    """The kinds of a case. The search keeps the best cases of every niche, since one weakness may hide another."""
    kinds = {
        "slow machine": machine_of(case.profile).step_s > SLOW_STEP_S,
        "conversations": any(group.turns > 1 for group in case.chats),
        "wrong costs": (case.scale, case.noise, case.rare_every) != (1.0, 0.0, 0),
        "little memory": case.kv_blocks is not None or case.seats < SEATS[0],
    }
    return ", ".join(name for name, holds in kinds.items() if holds) or "plain"


@dataclass(slots=True)
class Search:
    """The state of a search, which depends only on its seed and the judged breaches."""

    seed: int
    applies: Callable[[Case], bool]
    profiles: Sequence[str] = PROFILES
    num_tries: int = 0
    found: dict[str, list[Tried]] = field(default_factory=dict)
    """Best cases of each niche, the best first."""
    failed: list[Tried] = field(default_factory=list)
    """Cases in which the engine failed, whatever the promise."""
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    @property
    def best(self) -> Tried | None:
        """The best of all niches."""
        return max((tried[0] for tried in self.found.values()), key=lambda one: one.breach.score, default=None)

    @property
    def broken(self) -> list[Tried]:
        """The best case of each niche with a breach, the worst breach first."""
        best = [tried[0] for tried in self.found.values() if tried[0].breach.is_broken]
        return sorted(best, key=lambda one: -one.breach.amount)

    def next_cases(self) -> list[Case]:
        """The cases to judge next."""
        return [self._next_case() for _ in range(BATCH)]

    def learn(self, case: Case, breach: Breach) -> None:
        """Takes in a case's breach."""
        self.num_tries += 1
        if breach.failure is not None:
            self.failed.append(Tried(case, breach))
        if breach.amount == -math.inf:
            return
        best = self.found.setdefault(niche_of(case), [])
        if any(case == one.case for one in best):
            return
        best.append(Tried(case, breach))
        best.sort(key=lambda one: -one.breach.score)
        del best[ELITE:]

    def _next_case(self) -> Case:
        draw = self._draw
        while True:
            if self.num_tries < FIRST_TRIES or not self.found or draw.random() < FRESH_SHARE:
                case = random_case(draw, self.profiles)
            else:
                one, other = (draw.choice(draw.choice(list(self.found.values()))) for _ in range(2))
                case = mutated(one.case, other.case, draw, self.profiles)
                if one.breach.reached is not None and draw.random() < TIGHTENED_SHARE:
                    case = tightened(case, one.breach.reached, draw)
            if self.applies(case):
                return case


def search(
    promise: str,
    policy: str,
    seed: int,
    budget: Budget,
    *,
    profiles: Sequence[str] = PROFILES,
    kind: str = "",
    jobs: int = 1,
    stop_at: float = math.inf,
    on_progress: OnProgress = lambda line: None,
) -> Search:
    """Searches until the budget is spent, or a breach has at least the amount ``stop_at``.

    Args:
        kind: one of ``KINDS`` that all cases must have; any if empty.
        jobs: processes that simulate.
    """
    applies = PROMISES[promise].applies
    state = Search(seed, lambda case: applies(case) and kind in niche_of(case), profiles)
    judge = functools.partial(confirmed, promise, policy)
    if jobs == 1:
        _run(state, lambda cases: map(judge, cases), budget, stop_at, on_progress)
    else:
        with ProcessPoolExecutor(jobs) as pool:
            _run(state, lambda cases: pool.map(judge, cases), budget, stop_at, on_progress)
    return state


def _run(
    state: Search,
    judge_all: Callable[[list[Case]], Iterable[Breach]],
    budget: Budget,
    stop_at: float,
    on_progress: OnProgress,
) -> None:
    end_s = time.monotonic() + budget.seconds_s
    best = -math.inf
    while time.monotonic() < end_s and (budget.tries is None or state.num_tries < budget.tries):
        cases = state.next_cases()
        for case, breach in zip(cases, judge_all(cases), strict=True):
            state.learn(case, breach)
        if state.best is not None and state.best.breach.score > best:
            breach = state.best.breach
            best = breach.score
            on_progress(f"try {state.num_tries}: {breach.amount:+.3f}: {breach.text} ({niche_of(state.best.case)})")
            if breach.amount >= stop_at:
                return
