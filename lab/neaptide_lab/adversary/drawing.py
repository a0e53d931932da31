"""Random cases and random changes of cases."""

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.device_profile import load_profile
from neaptide_lab.adversary.case import CAPS, MAX_ANSWER_TOKENS, MAX_CONTEXT_TOKENS, SEATS, Case, Chats, Rows

Scaled = TypeVar("Scaled", Case, Chats, Rows)

MAX_REQUESTS = 200
MAX_DURATION_S = 60.0
LEAST_DURATION_S = 2.0
DURATIONS_S = 4.0, 20.0
"""Values for cases without chats, on a fast machine."""
CHATS = 20, 100
"""Requests of a group of chats."""
MOST_DRAWN_ANSWER_TOKENS = 300
SLOW_STEP_S = 0.05
"""A machine whose steps of decodes take longer is a slow one."""
MAX_GROUPS = 3
MAX_TURNS = 12
MAX_TENANTS = 3
STREAMS = 16
"""Decodes of a typical step, and their context."""
STREAM_TOKENS = 1024
TIGHTEST = 1.1, 2.5
"""Bounds of the factor from what chats reach to their targets."""
DIGITS = 2
"""Significant digits of drawn numbers, for people to read."""
LARGEST_ROUND = 99
"""A whole number up to this is not rounded."""


@dataclass(slots=True, frozen=True)
class Machine:
    """A profile's times, from which loads are drawn that it can nearly serve."""

    token_s: float
    """A prompt token in a large step."""
    step_s: float
    """A step of decodes alone."""
    decode_s: float
    """Time that one more decode adds to a step, in seconds."""
    num_blocks: int
    block_size: int

    def request_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """Machine time of one request."""
        return prompt_tokens * self.token_s + output_tokens * self.decode_s


@functools.cache
def machine_of(profile_name: str) -> Machine:
    profile = load_profile(profile_name)
    model = RooflineModel.from_profile(profile)
    prompt, longer = BatchShape(), BatchShape()
    prompt.add(1024, 0)
    longer.add(2048, 0)
    decodes, more = (
        BatchShape().plus_decodes(count, count * STREAM_TOKENS, STREAM_TOKENS) for count in (STREAMS, 2 * STREAMS)
    )
    prompt_s, longer_s, step_s, more_s = (model.predict(s).seconds for s in (prompt, longer, decodes, more))
    return Machine(
        (longer_s - prompt_s) / 1024, step_s, max((more_s - step_s) / STREAMS, 1e-6), profile.num_blocks,
        profile.block_size,
    )  # fmt: skip


def random_case(draw: random.Random, profiles: Sequence[str]) -> Case:
    """A case from the whole space: machine, targets, errors of the cost model, chats and jobs are independent."""
    profile = draw.choice(profiles)
    machine = machine_of(profile)
    tpot_s = _log_uniform(draw, 1.4 * machine.step_s, 6.0 * machine.step_s)
    ttft_s = _log_uniform(draw, 1.5 * tpot_s, 60.0 * tpot_s)
    case = Case(
        profile=profile,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        duration_s=_log_uniform(draw, *DURATIONS_S) * (2.0 if machine.step_s > SLOW_STEP_S else 1.0),
        kv_blocks=_memory(draw, machine),
        seats=draw.choice((SEATS[0], *SEATS)),
        cap_tokens=draw.choice(CAPS),
        seed=draw.randrange(1000),
        **_error(draw),
    )
    chats = [_chats(draw, case) for _ in range(draw.choice((0, 1, 1, 1, 2, 2)))]
    if chats:
        # The arrivals fill the time: what comes after the last chat is offline work alone.
        lasting_s = max(group.count * group.gap_s + (group.turns - 1) * group.think_s for group in chats)
        case = replace(case, duration_s=min(max(lasting_s, LEAST_DURATION_S), MAX_DURATION_S))
    rows = [_rows(draw, case) for _ in range(draw.choice((0, 1, 1, 2, 3) if chats else (1, 2, 3)))]
    return tidy(replace(case, chats=tuple(chats), rows=tuple(rows)))


def mutated(case: Case, other: Case, draw: random.Random, profiles: Sequence[str]) -> Case:
    """The case with one to three changes, one of which may come from another case."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        case = _changed(case, other, draw, profiles)
    return tidy(case)


def tightened(case: Case, reached: tuple[float, float], draw: random.Random) -> Case:
    """The case with targets a little above what is reached, as a fraction of its targets."""
    ttft_ratio, tpot_ratio = (ratio * draw.uniform(*TIGHTEST) for ratio in reached)
    return tidy(
        replace(case, ttft_s=case.ttft_s * ttft_ratio, tpot_s=case.tpot_s * tpot_ratio if tpot_ratio else case.tpot_s)
    )


def tidy(case: Case) -> Case:
    """The case with rounded numbers within the limits of a small load that fits into the memory."""
    machine = machine_of(case.profile)
    blocks = case.kv_blocks
    if blocks is not None:
        blocks = min(max(_round(blocks), 2 * MAX_ANSWER_TOKENS // machine.block_size), machine.num_blocks)
    tokens = min((blocks or machine.num_blocks) * machine.block_size, MAX_CONTEXT_TOKENS)
    most_prompt_tokens = _floor(max((tokens - MAX_ANSWER_TOKENS) // 2, 16))
    duration_s = min(max(_round_s(case.duration_s), LEAST_DURATION_S), MAX_DURATION_S)
    case = replace(case, kv_blocks=blocks, duration_s=duration_s, ttft_s=_round_s(case.ttft_s),
                   tpot_s=_round_s(case.tpot_s), scale=_round_s(case.scale), noise=_round_s(case.noise),
                   rare_factor=_round_s(case.rare_factor), rare_every=_round(case.rare_every))  # fmt: skip
    left = MAX_REQUESTS
    chats: list[Chats] = []
    for group in case.chats:
        group = _tidy_chats(group, most_prompt_tokens, left, duration_s)
        left -= group.num_requests
        if group.count:
            chats.append(group)
    jobs: list[Rows] = []
    for job in case.rows:
        job = _tidy_rows(job, most_prompt_tokens, left, duration_s)
        left -= job.count
        if job.count:
            jobs.append(job)
    return replace(case, chats=tuple(chats), rows=tuple(jobs))


def _tidy_chats(group: Chats, most_prompt_tokens: int, left: int, duration_s: float) -> Chats:
    turns = min(max(group.turns, 1), MAX_TURNS)
    prefix_tokens = min(_round(group.prefix_tokens), most_prompt_tokens)
    longest = _floor(most_prompt_tokens // (2 if group.spread else 1))
    output_tokens = min(max(_round(group.output_tokens), 1), MAX_ANSWER_TOKENS)
    if turns > 1:
        longest = _floor(max(longest // turns, 1))
        output_tokens = min(output_tokens, longest)
    return replace(
        group,
        count=min(max(group.count, 0), max(left, 0) // turns),
        gap_s=_round_s(group.gap_s),
        prompt_tokens=min(max(_round(group.prompt_tokens), 1), longest),
        output_tokens=output_tokens,
        start_s=_round_s(min(group.start_s, duration_s / 2)),
        burst=max(group.burst, 1),
        spread=min(_round_s(group.spread), 1.5),
        prefix_tokens=prefix_tokens,
        turns=turns,
        think_s=_round_s(group.think_s),
        cancelled=min(_round_s(group.cancelled), 0.9),
        cancel_after_s=_round_s(group.cancel_after_s),
    )


def _tidy_rows(job: Rows, most_prompt_tokens: int, left: int, duration_s: float) -> Rows:
    longest = _floor(most_prompt_tokens // (2 if job.spread else 1))
    submitted_s = _round_s(min(job.submitted_s, duration_s / 2))
    cancel_at_s = job.cancel_at_s
    if cancel_at_s is not None:
        cancel_at_s = _round_s(max(cancel_at_s, submitted_s + 1.0))
    return replace(
        job,
        count=min(max(job.count, 0), max(left, 0)),
        prompt_tokens=min(max(_round(job.prompt_tokens), 1), longest),
        output_tokens=min(max(_round(job.output_tokens), 1), MAX_ANSWER_TOKENS),
        submitted_s=submitted_s,
        spread=min(_round_s(job.spread), 1.5),
        prefix_tokens=min(_round(job.prefix_tokens), most_prompt_tokens),
        prefix_rows=max(job.prefix_rows, 1),
        cancel_at_s=cancel_at_s,
    )


# ---- drawing ----


def _memory(draw: random.Random, machine: Machine) -> int | None:
    return None if draw.random() < 0.4 else round(_log_uniform(draw, 0.05, 0.6) * machine.num_blocks)


def _error(draw: random.Random) -> dict[str, Any]:
    """Fields of a cost model that is right, or wrong in one or more ways."""
    if draw.random() < 0.6:
        return {}
    has_rare = draw.random() < 0.3
    return {
        "scale": _log_uniform(draw, 0.7, 1.4),
        "noise": draw.choice((0.0, 0.05, 0.15)),
        "rare_every": draw.choice((100, 300)) if has_rare else 0,
        "rare_factor": _log_uniform(draw, 2.0, 12.0) if has_rare else 1.0,
    }


def _chats(draw: random.Random, case: Case) -> Chats:
    machine = machine_of(case.profile)
    most_tokens = max(min(8000, int(4.0 * case.ttft_s / machine.token_s)), 32)
    prompt_tokens = round(_log_uniform(draw, 16, most_tokens))
    output_tokens = round(_log_uniform(draw, 1, MOST_DRAWN_ANSWER_TOKENS))
    turns = draw.choice((1, 1, 2, 4, 8))
    request_s = machine.request_s(prompt_tokens, output_tokens)
    gap_s = turns * request_s / _log_uniform(draw, 0.1, 1.5)
    think_s = _log_uniform(draw, 0.2, case.duration_s / turns) if turns > 1 else 0.0
    is_cancelling = draw.random() < 0.2
    return Chats(
        count=max(round(_log_uniform(draw, *CHATS) / turns), 1),
        gap_s=gap_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        start_s=draw.choice((0.0, 0.0, case.duration_s / 4)),
        burst=draw.choice((1, 1, 1, 2, 8)),
        is_poisson=draw.random() < 0.5,
        spread=draw.choice((0.0, 0.0, 0.5, 1.0)),
        prefix_tokens=round(_log_uniform(draw, 64, most_tokens)) if draw.random() < 0.3 else 0,
        turns=turns,
        think_s=think_s,
        cancelled=draw.choice((0.2, 0.5)) if is_cancelling else 0.0,
        cancel_after_s=_log_uniform(draw, 0.1, 5.0) if is_cancelling else 0.0,
    )


def _rows(draw: random.Random, case: Case) -> Rows:
    has_prefix = draw.random() < 0.3
    return Rows(
        count=draw.choice((5, 20, 50, 100)),
        prompt_tokens=round(_log_uniform(draw, 16, 8000)),
        output_tokens=round(_log_uniform(draw, 1, 500)),
        submitted_s=draw.choice((0.0, 0.0, 0.0, case.duration_s / 4)),
        spread=draw.choice((0.0, 0.0, 0.5, 1.0)),
        prefix_tokens=round(_log_uniform(draw, 64, 8000)) if has_prefix else 0,
        prefix_rows=draw.choice((2, 5, 20)) if has_prefix else 1,
        tenant=draw.randrange(MAX_TENANTS),
        cancel_at_s=draw.uniform(0.2, 0.9) * case.duration_s if draw.random() < 0.1 else None,
    )


def _changed(case: Case, other: Case, draw: random.Random, profiles: Sequence[str]) -> Case:
    kind = draw.randrange(10)
    if kind == 0:
        return replace(case, cap_tokens=draw.choice(CAPS), seats=draw.choice(SEATS), seed=draw.randrange(1000))
    if kind == 1:
        return replace(case, kv_blocks=_memory(draw, machine_of(case.profile)), **(_error(draw) or _NO_ERROR))
    if kind == 2:
        return _scaled(case, draw, ("ttft_s", "tpot_s", "duration_s"))
    if kind == 3:
        return replace(case, profile=draw.choice(profiles), kv_blocks=None)
    if kind == 4 and len(case.chats) < MAX_GROUPS:
        return replace(case, chats=(*case.chats, draw.choice([*other.chats, _chats(draw, case)])))
    if kind == 5 and len(case.rows) < MAX_GROUPS:
        return replace(case, rows=(*case.rows, draw.choice([*other.rows, _rows(draw, case)])))
    if kind == 6 and len(case.chats) + len(case.rows) > 1:
        index = draw.randrange(len(case.chats) + len(case.rows))
        return _without(case, index)
    index = draw.randrange(len(case.chats) + len(case.rows))
    if index < len(case.chats):
        group = _changed_group(case.chats[index], _chats(draw, case), draw)
        return replace(case, chats=(*case.chats[:index], group, *case.chats[index + 1 :]))
    index -= len(case.chats)
    job = _changed_group(case.rows[index], _rows(draw, case), draw)
    return replace(case, rows=(*case.rows[:index], job, *case.rows[index + 1 :]))


_NO_ERROR: dict[str, Any] = {"scale": 1.0, "noise": 0.0, "rare_every": 0, "rare_factor": 1.0}


def _without(case: Case, index: int) -> Case:
    """The case without one of its groups; chats come first."""
    count = len(case.chats)
    if index < count:
        return replace(case, chats=case.chats[:index] + case.chats[index + 1 :])
    index -= count
    return replace(case, rows=case.rows[:index] + case.rows[index + 1 :])


def _changed_group(group: Scaled, fresh: Scaled, draw: random.Random) -> Scaled:
    """A group with one field scaled, or taken from a fresh one."""
    name = draw.choice([field.name for field in fields(group)])
    value = getattr(group, name)
    if draw.random() < 0.5 and value and not isinstance(value, bool):
        return _scaled(group, draw, (name,))
    changes: dict[str, Any] = {name: getattr(fresh, name)}
    return replace(group, **changes)


def _scaled(one: Scaled, draw: random.Random, names: tuple[str, ...]) -> Scaled:
    name = draw.choice(names)
    value = getattr(one, name)
    scaled = value * _log_uniform(draw, 0.4, 2.5)
    changes: dict[str, Any] = {name: max(round(scaled), 1) if isinstance(value, int) else scaled}
    return replace(one, **changes)


def _log_uniform(draw: random.Random, low: float, high: float) -> float:
    return math.exp(draw.uniform(math.log(low), math.log(max(high, low))))


def _round(number: float) -> int:
    return int(round_to(number, DIGITS)) if number > LARGEST_ROUND else round(number)


def _floor(number: int) -> int:
    """The largest rounded number up to this."""
    rounded = _round(number)
    return rounded if rounded <= number else _round(number - 10 ** (len(str(number)) - DIGITS))


def _round_s(number: float) -> float:
    return round_to(number, DIGITS)


def round_to(number: float, digits: int) -> float:
    """The number with this many significant digits."""
    return float(f"{number:.{digits}g}")
