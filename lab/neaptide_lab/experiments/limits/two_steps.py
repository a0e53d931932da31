"""Whether two steps should be chosen together: exhaustive search over two and three steps of small states.

SlidingServe (arXiv 2606.05933) chooses the chunks of two consecutive steps together. Here every state is searched for
the best one step at a time, for the best two or three steps together, and policies are driven from the same state. A
plan is the better one if fewer requests are late after it, or can no longer be in time; then, if all the work, that of
the pool included, can be done earlier. The seconds between two such times are device time for offline work.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.device_profile import load_profile
from neaptide_lab.experiments.limits.driven import driven
from neaptide_lab.experiments.limits.small_states import (
    Judge,
    OfflineRow,
    Plan,
    Prompt,
    State,
    Stream,
    best_plan,
    greedy_plan,
)
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "two-steps"
ABOUT = "the best two and three steps of small states by exhaustive search, beside one step at a time and policies"

PROFILE = "a100-40g-llama-3.1-8b"
MAX_TOKENS = 2048
POLICIES = (
    "neaptide",
    "priority",
    "neaptide_lab.policies.qoserve:QoServePaced",
    "neaptide_lab.policies.slidingserve:SlidingServePaced",
)
LEAST_GAIN_S = 1e-3
"""Time that counts as a gain, in seconds."""


@dataclass(slots=True, frozen=True)
class Size:
    two_units: int
    """Chunks of plans of two steps, in tokens."""
    three_units: int | None
    """Chunks of plans of three steps; None for none."""
    num_drawn: int
    """Drawn states besides the made ones."""


FULL = Size(two_units=256, three_units=512, num_drawn=24)
QUICK = Size(two_units=512, three_units=None, num_drawn=4)


def flood(count: int, tokens: int = 1280, prefix: str = "", prefix_tokens: int = 0) -> tuple[OfflineRow, ...]:
    return tuple(OfflineRow(f"row{prefix}{n}", tokens, prefix, prefix_tokens) for n in range(count))


def streams(*timings: tuple[float, int], context: int = 1000) -> tuple[Stream, ...]:
    """Streams whose next token is due after a time, with so many tokens to come, at 50 ms each."""
    return tuple(Stream(f"stream{n}", context, due_s, 0.05, left) for n, (due_s, left) in enumerate(timings))


def prompts(*timings: tuple[int, float], answer_tokens: int = 20) -> tuple[Prompt, ...]:
    """Prompts of so many tokens whose first token is due after a time."""
    return tuple(Prompt(f"prompt{n}", *each, answer_tokens=answer_tokens) for n, each in enumerate(timings))


CASES: dict[str, State] = {
    "short answers": State(streams((0.05, 2), (0.06, 3), (0.09, 5)), prompts((1024, 0.5), (512, 0.4)), flood(2)),
    "burst of prompts": State(streams((0.12, 40)), prompts((512, 0.06), (512, 0.11), (512, 0.15), (512, 0.16))),
    "long prompt among short": State(streams((0.3, 60)), prompts((2048, 0.25), (256, 0.09), (256, 0.1)), flood(1)),
    "slack in hand": State(streams((0.3, 100), (0.25, 100)), prompts((1024, 0.3), (1024, 0.3)), flood(2)),
    "nearly late prompt": State(streams((0.05, 8), (0.07, 30)), prompts((1024, 0.09), (512, 0.2)), flood(1)),
    "shared prefix": State(streams((0.06, 20), (0.2, 50)), (), flood(3, 1280, "a", 1024) + flood(2)),
    "prompt behind a flood": State((), prompts((768, 0.07)), flood(4)),
}
"""States in which a second step could matter."""


def drawn(seed: int) -> State:
    """A state at random: up to three streams, up to three prompts, an offline pool or none."""
    rng = Random(seed)
    some_streams = streams(
        *((rng.choice((0.02, 0.05, 0.05, 0.1, 0.3)), rng.choice((2, 5, 20, 100))) for _ in range(rng.randrange(4))),
        context=rng.choice((300, 1000, 4000)),
    )
    some_prompts = prompts(
        *(
            (rng.choice((256, 512, 1024, 1536)), rng.choice((0.05, 0.1, 0.2, 0.4, 0.9)))
            for _ in range(rng.randrange(4))
        ),
        answer_tokens=rng.choice((1, 10, 100)),
    )
    rows = rng.choice(((), flood(2), flood(3, 768, "a", 512)))
    return State(some_streams, some_prompts, rows if some_streams or some_prompts else flood(2))


@dataclass(slots=True, frozen=True)
class Found:
    """Plans of one state with the same number of steps."""

    one_by_one: Plan
    """Each step is the best of the state before it."""
    sliding: Plan
    """Each step is the first of the best two."""
    together: Plan
    """The best of all."""

    @property
    def saved(self) -> int:
        """Late requests that the steps together avoid."""
        return self.together.value.minus_late - self.one_by_one.value.minus_late

    @property
    def gain_s(self) -> float:
        """Time that the steps together leave for offline work; 0 where they differ in late requests."""
        ours, theirs = self.together.value, self.one_by_one.value
        return 0.0 if self.saved else ours.minus_done_s - theirs.minus_done_s


def search(state: State, num_steps: int, judge: Judge, unit_tokens: int) -> Found:
    """Every kind of plan of a state."""
    args = num_steps, judge, unit_tokens, MAX_TOKENS
    together = best_plan(state, *args)
    return Found(greedy_plan(state, *args), greedy_plan(state, *args, look_ahead=2), together)


def driven_plan(state: State, policy: str, num_steps: int, judge: Judge) -> Plan:
    """A policy's plan of a state."""
    steps, end = driven(state, policy, num_steps, judge.cost_model, MAX_TOKENS), state
    for step in steps:
        end = end.after(step, judge.cost_model)
    return Plan(judge.value(end), steps, end)


def run(quick: bool) -> ExperimentResult:
    size = QUICK if quick else FULL
    states = CASES | {f"drawn {seed}": drawn(seed) for seed in range(size.num_drawn)}
    return run_states(states, size, POLICIES)


def run_states(states: dict[str, State], size: Size, policies: Sequence[str]) -> ExperimentResult:
    """The experiment on these states, beside these policies."""
    judge = Judge(RooflineModel.from_profile(load_profile(PROFILE)))
    rows: list[Row] = []
    data: dict[str, Any] = {}
    for num_steps, unit_tokens in ((2, size.two_units), (3, size.three_units)):
        if unit_tokens is None:
            continue
        found: dict[str, Found] = {}
        of_policies: dict[str, list[Plan]] = {policy: [] for policy in policies}
        for name, state in states.items():
            logging.getLogger(__name__).info("%d steps of: %s", num_steps, name)
            found[name] = search(state, num_steps, judge, unit_tokens)
            for policy in policies:
                of_policies[policy].append(driven_plan(state, policy, num_steps, judge))
            if name in CASES:
                rows += _case_rows(f"{num_steps} steps, {name}", found[name], of_policies)
        rows += _summary_rows(num_steps, list(found.values()), of_policies)
        data[f"{num_steps} steps"] = {
            "unit_tokens": unit_tokens,
            "states": {name: _found_data(one) for name, one in found.items()},
            "policies": {policy: [_plan_data(plan) for plan in plans] for policy, plans in of_policies.items()},
        }
    notes = [
        f"{PROFILE}, {MAX_TOKENS:,} step tokens, TPOT 50 ms; chunks of {size.two_units} tokens in plans of two steps, "
        f"{size.three_units or 'none'} in plans of three. Policies are not bound to such chunks.",
        "A request is late if its first token was, if its last one was (TPOT is a mean), or if neither can be in time "
        "any more on a device that does nothing else.",
        "Milliseconds are the earliest time at which all work of the state could be done after these steps: every "
        "token computed, and a step for each token of the longest answer.",
        "Policies do not know lengths of answers, and keep time for requests that may come; no plan here does.",
    ]
    return ExperimentResult(NAME, rows, notes, {"horizons": data}, against="steps together")


def _case_rows(name: str, found: Found, of_policies: dict[str, list[Plan]]) -> list[Row]:
    best = found.together.value
    plans = {"one by one": found.one_by_one, "first of two": found.sliding}
    plans |= {policy.rpartition(":")[2]: of_policy[-1] for policy, of_policy in of_policies.items()}
    return [
        Row(
            f"{name} ({-best.minus_late} late): {way} ({-plan.value.minus_late} late)",
            -1e3 * plan.value.minus_done_s,
            -1e3 * best.minus_done_s,
            "ms",
            digits=1,
        )
        for way, plan in plans.items()
    ]


def _summary_rows(num_steps: int, found: Sequence[Found], of_policies: dict[str, list[Plan]]) -> list[Row]:
    """``Row.paper`` is what the steps together have."""
    best = sum(-one.together.value.minus_late for one in found)
    name = f"{num_steps} steps, {len(found)} states"
    rows = [
        Row(f"{name}: late one by one", sum(-one.one_by_one.value.minus_late for one in found), best, digits=0),
        Row(f"{name}: late by the first of two", sum(-one.sliding.value.minus_late for one in found), best, digits=0),
    ]
    rows += [
        Row(f"{name}: late by {policy.rpartition(':')[2]}", sum(-p.value.minus_late for p in plans), best, digits=0)
        for policy, plans in of_policies.items()
    ]
    gains_s = [one.gain_s for one in found]
    gaining = sum(gain_s > LEAST_GAIN_S for gain_s in gains_s)
    return [
        *rows,
        Row(f"{name}: states where together saves a late request", sum(one.saved > 0 for one in found), digits=0),
        Row(f"{name}: states where together saves {1e3 * LEAST_GAIN_S:g} ms", gaining, digits=0),
        Row(f"{name}: mean time that together saves", 1e3 * sum(gains_s) / len(gains_s), unit="ms"),
        Row(f"{name}: most time that together saves", 1e3 * max(gains_s), unit="ms"),
    ]


def _found_data(found: Found) -> dict[str, Any]:
    ways = {"one_by_one": found.one_by_one, "first_of_two": found.sliding, "together": found.together}
    return {way: _plan_data(plan) for way, plan in ways.items()}


def _plan_data(plan: Plan) -> dict[str, Any]:
    return {
        "late": -plan.value.minus_late,
        "done_s": -plan.value.minus_done_s,
        "offline_tokens": plan.end.offline_tokens,
        "seconds": plan.end.now_s,
        "steps": [{part.name: part.tokens for part in step} for step in plan.steps],
    }
