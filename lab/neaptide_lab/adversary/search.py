"""The search for a case that breaks a promise: random cases, and changes of those that came nearest."""

import functools
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from neaptide_lab.adversary.case import PROFILES, Case
from neaptide_lab.adversary.drawing import mutated, random_case
from neaptide_lab.adversary.promises import PROMISES, Breach
from neaptide_lab.adversary.runs import Outcome, TooLong, simulate_case

FRESH_SHARE = 0.3
"""Fraction of the tries that begin anew."""
FIRST_TRIES = 24
"""Tries before the first change of an earlier one."""
ELITE = 8
"""Cases that are changed further."""
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
    found = PROMISES[promise]
    if not found.applies(case):
        return IMPOSSIBLE
    try:
        breaches = [found.measure(case.sibling(number), policy, _simulated) for number in range(siblings)]
    except (TooLong, ValueError):
        return IMPOSSIBLE
    amount = sum(breach.amount for breach in breaches) / siblings
    hint = sum(breach.hint for breach in breaches) / siblings
    return Breach(amount, breaches[0].text, hint)


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


@dataclass(slots=True)
class Search:
    """The state of a search, which depends only on its seed and the judged breaches."""

    seed: int
    applies: Callable[[Case], bool]
    profiles: Sequence[str] = PROFILES
    tries: int = 0
    found: list[tuple[float, Case, Breach]] = field(default_factory=list)
    """Best cases by score, the best first."""
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    @property
    def best(self) -> tuple[Case, Breach] | None:
        return self.found[0][1:] if self.found else None

    def next_cases(self) -> list[Case]:
        """The cases to judge next."""
        return [self._next_case() for _ in range(BATCH)]

    def learn(self, case: Case, breach: Breach) -> None:
        """Takes in a case's breach."""
        self.tries += 1
        if breach.amount == -math.inf or any(case == other for _, other, _ in self.found):
            return
        self.found.append((breach.score, case, breach))
        self.found.sort(key=lambda entry: -entry[0])
        del self.found[ELITE:]

    def _next_case(self) -> Case:
        draw = self._draw
        while True:
            if self.tries < FIRST_TRIES or not self.found or draw.random() < FRESH_SHARE:
                case = random_case(draw, self.profiles)
            else:
                (_, case, _), (_, other, _) = draw.choice(self.found), draw.choice(self.found)
                case = mutated(case, other, draw, self.profiles)
            if self.applies(case):
                return case


def search(
    promise: str,
    policy: str,
    seed: int,
    budget: Budget,
    *,
    profiles: Sequence[str] = PROFILES,
    jobs: int = 1,
    stop_at: float = math.inf,
    on_progress: OnProgress = lambda line: None,
) -> Search:
    """Searches until the budget is spent, or a breach has at least the amount ``stop_at``.

    Args:
        jobs: processes that simulate.
    """
    state = Search(seed, PROMISES[promise].applies, profiles)
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
    while time.monotonic() < end_s and (budget.tries is None or state.tries < budget.tries):
        cases = state.next_cases()
        for case, breach in zip(cases, judge_all(cases), strict=True):
            state.learn(case, breach)
        if state.best is not None and state.found[0][0] > best:
            best, breach = state.found[0][0], state.best[1]
            on_progress(f"try {state.tries}: {breach.amount:+.3f}: {breach.text}")
            if breach.amount >= stop_at:
                return
