"""A quote for people: a sentence and a table."""

import time
from collections.abc import Iterator
from typing import Any

from neaptide.durations import duration

_ANSWERS = {"on_time": "yes", "at_risk": "perhaps", "infeasible": "no"}


def quote_lines(quote: dict[str, Any]) -> Iterator[str]:
    """The lines to print.

    Args:
        quote: reply of ``POST /v1/batches/quote``.
    """
    yield quote["sentence"]
    prompt, shared = quote["input_tokens"], quote["shared_tokens"]
    yield (
        f"{quote['lines']:,} lines: {prompt:,} prompt tokens, {shared / max(prompt, 1):.0%} of them in shared "
        f"prefixes, and about {quote['output_tokens']['p50']:,} answer tokens."
    )
    saved = quote["shared_device_seconds"]
    needs = f"It needs {duration(quote['device_seconds']['p50'])} of the device"
    yield needs + (f"; shared prefixes save {duration(saved)}." if saved >= 1 else ".")
    yield ""
    yield f"{'window':<8}{'half of the cases':<26}{'nine of ten':<26}in time?"
    for one in quote["windows"]:
        half, most = (_until(one[f"{name}_seconds"], one[f"{name}_at"]) for name in ("p50", "p90"))
        yield f"{one['completion_window']:<8}{half:<26}{most:<26}{_ANSWERS[one['outlook']]}"
    for one in quote["windows"]:
        if one["reason"] is not None:
            yield f"{one['completion_window']}: {one['reason']}"
    yield ""
    yield from _basis(quote["basis"])


def _basis(basis: dict[str, Any]) -> Iterator[str]:
    count = basis["known_batches"]
    batches = "no ended batch" if not count else "an ended batch" if count == 1 else f"{count} ended batches"
    times = "with times of day" if basis["times_of_day"] else "too short for times of day"
    yield f"From {duration(basis['recorded_seconds'])} of recorded traffic ({times}) and {batches}."
    if basis["unchecked_batches"]:
        yield f"{basis['unchecked_batches']} batches are still being checked and are not counted."


def _until(seconds: float | None, at_s: int | None) -> str:
    if seconds is None or at_s is None:
        return "more than 2 days"
    return f"{duration(seconds)} ({time.strftime('%a %H:%M', time.localtime(at_s))})"
