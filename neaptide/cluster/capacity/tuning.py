"""Searches the step tokens and slots that suit a policy best at the size that it needs."""

from collections.abc import Callable, Sequence
from itertools import product

from neaptide.cluster.capacity.result import Plan, TriedLimits
from neaptide.simulation.points import PolicyPoint

STEP_TOKENS = (512, 1024, 2048, 4096)
SLOTS = (128, 256, 512)


def points_of(policy: str) -> list[PolicyPoint]:
    """The policy with every pair of limits that is tried: no fewer step tokens than slots, which vLLM refuses."""
    return [PolicyPoint(policy, *limits) for limits in product(STEP_TOKENS, SLOTS) if limits[0] >= limits[1]]


def tuned(points: Sequence[PolicyPoint], plan_of: Callable[[PolicyPoint], Plan]) -> Plan:
    """The best plan of the points, with what each of them gave."""
    plans = [plan_of(point) for point in points]
    best = max(plans, key=_worth)
    best.limits = [_tried(plan) for plan in plans]
    return best


def _worth(plan: Plan) -> tuple[float, float, float]:
    """The lowest price, then the most offline work, then the most chats in time."""
    if plan.answer is None or plan.cost is None:
        return float("-inf"), 0.0, max((point.attainment["both"] for point in plan.tried), default=0.0)
    offline = plan.offline.whole.tokens_per_s if plan.offline is not None else 0.0
    size = plan.answer.kv_blocks if plan.finds_memory else 0
    return -plan.cost - size, offline, plan.answer.attainment["both"]


def _tried(plan: Plan) -> TriedLimits:
    answer = plan.answer
    return TriedLimits(
        policy=plan.policy,
        replicas=None if answer is None else answer.replicas,
        attained=None if answer is None else answer.attainment["both"],
        offline_tokens_per_s=None if plan.offline is None else plan.offline.whole.tokens_per_s,
    )
