"""Makes a case smaller as long as it breaks its promise."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from neaptide_lab.adversary.case import SEATS, Case, Chats, Rows
from neaptide_lab.adversary.drawing import LEAST_DURATION_S, round_to

MOST_TRIES = 300
CHOSEN = ("cap_tokens", "seats")
"""Numbers that are chosen from a few."""
PLAIN_CHATS: dict[str, Any] = {
    "start_s": 0.0,
    "burst": 1,
    "is_poisson": False,
    "spread": 0.0,
    "prefix_tokens": 0,
    "turns": 1,
    "cancelled": 0.0,
}
PLAIN_ROWS: dict[str, Any] = {
    "submitted_s": 0.0,
    "spread": 0.0,
    "prefix_tokens": 0,
    "tenant": 0,
    "cancel_at_s": None,
}
PLAIN_CASE: tuple[dict[str, Any], ...] = (
    {"scale": 1.0},
    {"noise": 0.0},
    {"rare_every": 0, "rare_factor": 1.0},
    {"kv_blocks": None},
    {"seats": SEATS[0]},
    {"seed": 0},
)


def size_of(case: Case) -> tuple[float, ...]:
    """Size of a case: groups, unusual features, requests, digits, tokens and seconds; a smaller case has less."""
    groups = case.groups
    unusual = sum(any(getattr(case, name) != value for name, value in plain.items()) for plain in PLAIN_CASE)
    unusual += sum(getattr(group, name) != value for group in case.chats for name, value in PLAIN_CHATS.items())
    unusual += sum(getattr(job, name) != value for job in case.rows for name, value in PLAIN_ROWS.items())
    digits = sum(_digits(value) for one in (case, *groups) for value in _numbers(one))
    tokens = sum(
        group.num_requests * (group.prompt_tokens + group.output_tokens + group.prefix_tokens) for group in groups
    )
    return len(groups), unusual, case.num_requests, digits, tokens, case.duration_s


def shrunk(
    case: Case,
    is_broken: Callable[[Case], bool],
    *,
    most_tries: int = MOST_TRIES,
    seconds_s: float = math.inf,
) -> Case:
    """A smaller case that still breaks the promise. If the budget sufficed, no step of the shrinker keeps it broken.

    Args:
        is_broken: whether a case breaks the promise, clearly enough. It must hold for ``case``.
        most_tries: calls of ``is_broken``.
    """
    end_s, tries, seen = time.monotonic() + seconds_s, 0, {case}
    has_changed = True
    while has_changed:
        has_changed, index = False, 0
        candidates = list(_smaller(case))
        while index < len(candidates):
            smaller = candidates[index]
            index += 1
            if smaller in seen or not smaller.num_requests or size_of(smaller) >= size_of(case):
                continue
            if tries >= most_tries or time.monotonic() >= end_s:
                return case
            tries += 1
            seen.add(smaller)
            if is_broken(smaller):
                # What did not work before will hardly work now: go on from here, and begin again only at the end.
                case, has_changed, index = smaller, True, index - 1
                candidates = list(_smaller(case))
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Smaller cases, those that take away most first."""
    yield _rounded_at_once(_plain(case))
    yield _plain(case)
    yield _rounded_at_once(case)
    yield from map(_without_idle_fields, _steps(case))


def _plain(case: Case) -> Case:
    """The case without anything unusual."""
    for plain in PLAIN_CASE:
        case = replace(case, **plain)
    chats = tuple(replace(group, **PLAIN_CHATS) for group in case.chats)
    rows = tuple(replace(job, **PLAIN_ROWS) for job in case.rows)
    return _without_idle_fields(replace(case, chats=chats, rows=rows))


def _rounded_at_once(case: Case) -> Case:
    """The case with one digit in all its numbers."""
    for changes in _roundings(case):
        case = replace(case, **changes)
    chats, rows = list(case.chats), list(case.rows)
    for index in range(len(chats)):
        for changes in _roundings(chats[index]):
            chats[index] = replace(chats[index], **changes)
    for index in range(len(rows)):
        for changes in _roundings(rows[index]):
            rows[index] = replace(rows[index], **changes)
    return replace(case, chats=tuple(chats), rows=tuple(rows))


def _without_idle_fields(case: Case) -> Case:
    """The same load, with the defaults of fields that have no effect."""
    chats = tuple(
        replace(
            group,
            think_s=group.think_s if group.turns > 1 else 0.0,
            cancel_after_s=group.cancel_after_s if group.cancelled else 0.0,
        )
        for group in case.chats
    )
    rows = tuple(replace(job, prefix_rows=job.prefix_rows if job.prefix_tokens else 1) for job in case.rows)
    return replace(case, chats=chats, rows=rows)


def _steps(case: Case) -> Iterator[Case]:
    """Cases that differ from this one in one thing."""
    for index in range(len(case.chats)):
        yield replace(case, chats=case.chats[:index] + case.chats[index + 1 :])
    for index in range(len(case.rows)):
        yield replace(case, rows=case.rows[:index] + case.rows[index + 1 :])
    for plain in PLAIN_CASE:
        yield replace(case, **plain)
    for index, group in enumerate(case.chats):
        for smaller in _smaller_chats(group):
            yield replace(case, chats=(*case.chats[:index], smaller, *case.chats[index + 1 :]))
    for index, job in enumerate(case.rows):
        for smaller_job in _smaller_rows(job):
            yield replace(case, rows=(*case.rows[:index], smaller_job, *case.rows[index + 1 :]))
    for share in (0.5, 0.75):
        yield replace(case, duration_s=max(round_to(share * case.duration_s, 2), LEAST_DURATION_S))
    for index, group in enumerate(case.chats):
        for changes in _roundings(group):
            yield replace(case, chats=(*case.chats[:index], replace(group, **changes), *case.chats[index + 1 :]))
    for index, job in enumerate(case.rows):
        for changes in _roundings(job):
            yield replace(case, rows=(*case.rows[:index], replace(job, **changes), *case.rows[index + 1 :]))
    for changes in _roundings(case):
        yield replace(case, **changes)


def _smaller_chats(group: Chats) -> Iterator[Chats]:
    for name, value in PLAIN_CHATS.items():
        yield replace(group, **{name: value})
    yield from _fewer(group)
    for turns in sorted({group.turns // 2, group.turns - 1} - {0}):
        yield replace(group, turns=turns)


def _smaller_rows(job: Rows) -> Iterator[Rows]:
    for name, value in PLAIN_ROWS.items():
        yield replace(job, **{name: value})
    yield from _fewer(job)


def _fewer(group: Any) -> Iterator[Any]:
    for share in (0.25, 0.5, 0.75, 0.9):
        count = int(share * group.count)
        if count:
            yield replace(group, count=count)


def _roundings(one: Any) -> Iterator[dict[str, Any]]:
    """Each number of this with one digit."""
    for field in fields(one):
        value = getattr(one, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float) or field.name in CHOSEN:
            continue
        rounded = round_to(value, 1)
        yield {field.name: int(rounded) if isinstance(value, int) else rounded}


def _numbers(one: Any) -> Iterator[float]:
    values = (getattr(one, field.name) for field in fields(one) if field.name not in CHOSEN)
    return (value for value in values if isinstance(value, int | float) and not isinstance(value, bool))


def _digits(value: float) -> int:
    return len(f"{value:.6e}".partition("e")[0].replace(".", "").rstrip("0"))
