"""Promises of a policy, each a function that says by how much a case breaks it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from neaptide_lab.adversary.case import Case
from neaptide_lab.adversary.runs import QUANTUM_TOKENS, Outcome

Simulate = Callable[[Case, str, int | None], Outcome]
"""``runs.simulate_case``, perhaps with a memory."""

SPARE_RATIO = 0.8
"""A chat is safe alone if it needs at most this fraction of each target, and one more step of a TPOT target makes it no
later than its TTFT target. Any offline work may make others late."""
LEAST_CHATS = 20
"""Chats of a case that can break a promise about their number."""
LEAST_SAFE = 10
"""Chats that must be safe alone."""
MOST_LATE_SHARE = 0.05
"""Fraction of the safe chats that may be late only because of offline work."""
MOST_BEHIND_SHARE = 0.03
"""Fraction of the chats by which a constant cap may have more in time."""
LUCKY_CHATS = 2.0
"""Chats that may always be late beside offline work or without a cap: a small load proves nothing with fewer."""
MOST_LESS_WORK = 0.05
"""Fraction by which a constant cap may do more offline work with as many chats in time."""
COUNTED_ROWS = 2
"""Largest rows by which offline work may be less besides: where they stand at the end of the window is luck."""
MOST_OFF_SHARE = 0.1
"""Largest deviation of a tenant from its share, relative to it."""
COUNTED_QUANTA = 2
"""Quanta and largest rows by which a tenant's service may be off besides: turns are not finer."""
MOST_PREEMPTIONS = 5
MOST_AGAIN_SHARE = 0.2
"""Largest fraction of the computed tokens that were computed before."""
WAIT_TTFTS = 20.0
"""TTFT targets that a chat may wait while later ones begin, besides twice the longest wait under ``REFERENCE``."""
REFERENCE = "priority"
"""Serves chats first, in the order of arrival."""
OUT_SHARE = 0.5
"""Fraction of the duration for which a preempted row may be out while rows of its tenant begin."""
LOST_HITS_WEIGHT = 4.0
"""Weight in a hint of the prefix hits that chats lose: evictions come before late chats."""
REACHED_SHARE = 0.9
"""Fraction of the chats whose latencies say what can be reached."""
MOST_RATIO = 3.0
"""Lateness is not graded beyond this many targets."""


@dataclass(slots=True, frozen=True)
class Breach:
    """The result of a promise for a case."""

    amount: float
    """By how much the promise is broken, in its own measure; at most 0 if it is kept."""
    text: str
    """The numbers behind the amount, in one line."""
    hint: float = 0.0
    """How near the case comes to a breach, for cases whose amounts are equal."""
    reached: tuple[float, float] | None = None
    """TTFT and TPOT over their targets that nearly all chats reach without offline work or with the cap. Targets just
    above them can be met, and are hard to meet otherwise."""

    failure: str | None = None
    """Why the engine failed in one of the simulations, if it did. The amount says nothing then."""

    @property
    def is_broken(self) -> bool:
        return self.amount > 0.0

    @property
    def score(self) -> float:
        """Value that the search maximizes."""
        return self.amount + 0.02 * self.hint


@dataclass(slots=True, frozen=True)
class Promise:
    name: str
    about: str
    applies: Callable[[Case], bool]
    """Whether the case can break it at all."""
    measure: Callable[[Case, str, Simulate], Breach]
    siblings: int = 1
    """Random variants of a case over which the amount is averaged before a breach counts, because the measure is a
    matter of luck on a small load."""


def chats_late_beside(case: Case, policy: str, simulate: Simulate) -> Breach:
    """Chats that are late beside offline work and safely in time without it."""
    alone = simulate(case.alone(), policy, None)
    most_ttft_ratio = min(SPARE_RATIO, 1.0 - case.tpot_s / case.ttft_s)
    is_safe = [chat.ttft_ratio <= most_ttft_ratio and chat.tpot_ratio <= SPARE_RATIO for chat in alone.chats]
    if sum(is_safe) < LEAST_SAFE:
        return Breach(-1.0, f"only {sum(is_safe)} chats are safe alone", sum(is_safe), reached_by(alone))
    beside = simulate(case, policy, None)
    pairs = list(zip(alone.chats, beside.chats, strict=True))
    safe = [pair for pair, is_one in zip(pairs, is_safe, strict=True) if is_one]
    lost = sum(not other.is_in_time for _, other in safe)
    gained = sum(other.is_in_time and not one.is_in_time for one, other in pairs)
    net = lost - gained
    text = (
        f"{lost} of {len(safe)} safe chats late beside offline work, {gained} others in time only there; prefix hits "
        f"{alone.hit_share:.0%} alone, {beside.hit_share:.0%} beside"
    )
    hint = sum(min(other.ratio, MOST_RATIO) - one.ratio for one, other in safe) / len(safe)
    hint += LOST_HITS_WEIGHT * (alone.hit_share - beside.hit_share)
    amount = (net - max(MOST_LATE_SHARE * len(safe), LUCKY_CHATS)) / len(pairs)
    return Breach(amount, text, hint, reached_by(alone))


def cap_beats_policy(case: Case, policy: str, simulate: Simulate) -> Breach:
    """A constant cap on step tokens has more chats in time, or does more offline work with as many."""
    ours = simulate(case, policy, None)
    count = max(len(ours.chats), 1)
    allowed = max(MOST_BEHIND_SHARE * count, LUCKY_CHATS)
    if not case.rows and len(ours.chats) - ours.attained <= allowed:
        return Breach(-allowed / count, "nearly all in time, and no offline work", 0.0, reached_by(ours))
    capped = simulate(case, policy, case.cap_tokens)
    ahead = capped.attained - ours.attained
    text = (
        f"{capped.attained} of {len(ours.chats)} in time with {case.cap_tokens} tokens a step, {ours.attained} "
        f"without; {capped.offline_tokens:,} and {ours.offline_tokens:,} offline tokens"
    )
    amount = (ahead - allowed) / count
    more_tokens = capped.offline_tokens - ours.offline_tokens - COUNTED_ROWS * ours.largest_row_tokens
    more_work = more_tokens / ours.offline_tokens if ours.offline_tokens else 0.0
    if ahead >= 0:
        amount = max(amount, more_work - MOST_LESS_WORK)
    hint = sum(
        min(own.ratio, MOST_RATIO) - min(other.ratio, MOST_RATIO)
        for own, other in zip(ours.chats, capped.chats, strict=True)
    )
    return Breach(amount, text, hint / count + max(min(more_work, 0.1), -0.1), reached_by(capped))


def reached_by(outcome: Outcome) -> tuple[float, float] | None:
    """TTFT and TPOT over their targets that all chats but a tenth reach; None if that many did not end."""
    if not outcome.chats:
        return None
    last = int(REACHED_SHARE * (len(outcome.chats) - 1))
    ttft_ratio = sorted(chat.ttft_ratio for chat in outcome.chats)[last]
    tpot_ratio = sorted(chat.tpot_ratio for chat in outcome.chats)[last]
    return (ttft_ratio, tpot_ratio) if ttft_ratio < math.inf else None


def tenant_starves(case: Case, policy: str, simulate: Simulate) -> Breach:
    """A tenant gets less or more than its share while all have work, both of what is done and of what is admitted."""
    outcome = simulate(case, policy, None)
    grain = COUNTED_QUANTA * (QUANTUM_TOKENS + outcome.largest_row_tokens)
    worst, text = -1.0, "no two tenants had work at the same time"
    delivered = {tenant: share.delivered_tokens for tenant, share in outcome.tenants.items()}
    admitted = {tenant: share.admitted_tokens for tenant, share in outcome.tenants.items()}
    if not delivered:
        return Breach(worst, text)
    done_due, begun_due = sum(delivered.values()) / len(delivered), sum(admitted.values()) / len(admitted)
    for tenant in delivered:
        off = min(
            (abs(delivered[tenant] - done_due) - grain) / max(done_due, 1.0),
            (abs(admitted[tenant] - begun_due) - grain) / max(begun_due, 1.0),
        )
        if off - MOST_OFF_SHARE > worst:
            worst = off - MOST_OFF_SHARE
            text = f"{tenant}: {delivered[tenant]:,} tokens done and {admitted[tenant]:,} begun"
            text += f", its share is {done_due:,.0f} and {begun_due:,.0f}"
    return Breach(max(worst, -1.0), text)


def ping_pong(case: Case, policy: str, simulate: Simulate) -> Breach:
    """A request is preempted again and again, or too much is computed twice."""
    outcome = simulate(case, policy, None)
    again_share = outcome.again_tokens / max(outcome.computed_tokens, 1)
    text = (
        f"a request preempted {outcome.preemptions} times; {outcome.again_tokens:,} of {outcome.computed_tokens:,} "
        "tokens computed twice"
    )
    amount = max(outcome.preemptions / MOST_PREEMPTIONS, again_share / MOST_AGAIN_SHARE) - 1.0
    return Breach(amount, text, outcome.preemptions / MOST_PREEMPTIONS + again_share / MOST_AGAIN_SHARE)


def waits_for_ever(case: Case, policy: str, simulate: Simulate) -> Breach:
    """A chat waits while later ones begin, or a preempted row stays out while rows of its tenant begin."""
    outcome, reference = simulate(case, policy, None), simulate(case, REFERENCE, None)
    longest_s = max((chat.began_s - chat.arrival_s for chat in reference.chats), default=0.0)
    longest_s = min(longest_s, 2.0 * case.duration_s)
    bound_s = 2.0 * longest_s + WAIT_TTFTS * case.ttft_s
    passed_s = passed_over_s(outcome)
    out_bound_s = max(OUT_SHARE * case.duration_s, WAIT_TTFTS * case.ttft_s)
    text = (
        f"a chat waited {passed_s:.1f} s while later ones began ({bound_s:.1f} s allowed); a preempted row "
        f"{outcome.longest_out_s:.1f} s ({out_bound_s:.1f} s allowed)"
    )
    return Breach(max(passed_s / bound_s, outcome.longest_out_s / out_bound_s) - 1.0, text)


def passed_over_s(outcome: Outcome) -> float:
    """Longest time for which a chat waited while chats that arrived later began."""
    longest_s = 0.0
    chats = outcome.chats
    begun = sorted((chat.began_s, number) for number, chat in enumerate(chats) if chat.began_s < math.inf)
    for number, chat in enumerate(chats):
        later = [began_s for began_s, other in begun if other > number and began_s < chat.began_s]
        longest_s = max(longest_s, later[-1] - chat.arrival_s if later else 0.0)
    return longest_s


def engine_fails(case: Case, policy: str, simulate: Simulate) -> Breach:
    """The engine raises, stops, loses a request or disagrees with itself."""
    outcome = simulate(case, policy, None)
    hint = outcome.preemptions / MOST_PREEMPTIONS
    return Breach(1.0 if outcome.failure else -1.0, outcome.failure or "no failure", hint)


def _has_chats(case: Case) -> bool:
    return sum(group.num_requests for group in case.chats) >= LEAST_CHATS


def _has_both(case: Case) -> bool:
    return _has_chats(case) and bool(case.rows)


PROMISES = {
    promise.name: promise
    for promise in (
        Promise("late", "no chat is late only because of offline work", _has_both, chats_late_beside, 3),
        Promise("cap", "no constant cap on step tokens is better", _has_chats, cap_beats_policy, 3),
        Promise("share", "each tenant gets its share while it has work", lambda c: len(c.tenants) > 1, tenant_starves),
        Promise("pingpong", "no request is preempted again and again", lambda case: True, ping_pong),
        Promise("wait", "no request waits while later ones begin", _has_chats, waits_for_ever),
        Promise("failure", "the engine never fails", lambda case: True, engine_fails),
    )
}
