"""A receipt and costs for people: a sentence and a table."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from neaptide.durations import DAY_S, duration

if TYPE_CHECKING:
    from neaptide.server.batches.storing.cost_rows import DayCost

TIME_WORDS = {
    "checking": "checking its lines",
    "own_key": "work of its own key",
    "other_keys": "turns of other keys",
    "chats": "chats",
    "memory": "chats whose memory left none for batch work",
    "paused": "batch work was paused",
    "engine_gone": "no engine",
    "between_steps": "the engine between its steps or without work",
    "not_recorded": "not recorded: no server, or not known",
}


def receipt_lines(receipt: Mapping[str, Any]) -> Iterator[str]:
    """The lines to print.

    Args:
        receipt: reply of ``GET /v1/batches/{id}/receipt``.
    """
    tokens, total_s = receipt["tokens"], receipt["ended_at"] - receipt["created_at"]
    lines = receipt["lines"]
    said = f"{receipt['status']} in {duration(total_s)}: {lines['completed']:,} of {lines['total']:,} lines"
    if receipt["device_seconds"] is not None:
        said += f", {duration(receipt['device_seconds'])} of the device"
    yield f"{said}.{_promise(receipt)}"
    yield ""
    rows = [
        ("prompt tokens", tokens["prompt"]),
        ("  found in the cache", tokens["found_in_cache"]),
        ("  computed", tokens["computed_prefill"]),
        ("  its share of what was computed", tokens["prefill_share"]),
        ("answer tokens", tokens["answers"]),
        ("computed again", tokens["computed_again"]),
        ("preemptions", receipt["preemptions"]),
    ]
    for name, count in rows:
        yield f"{name:<34}{count:>16,}"
    if receipt["device_seconds"] is not None:
        yield f"{'device seconds, its share':<34}{receipt['device_seconds']:>16,.3f}"
        yield f"{'device seconds of its own lines':<34}{receipt['computed_device_seconds']:>16,.3f}"
    yield ""
    for name, seconds in sorted(receipt["time_seconds"].items(), key=lambda item: -item[1]):
        yield f"{TIME_WORDS.get(name, name):<50}{duration(seconds):>8}{seconds / max(total_s, 1):>6.0%}"
    yield ""
    yield f"hash {receipt['hash']}"


def _promise(receipt: Mapping[str, Any]) -> str:
    promise = receipt["promise"]
    if promise is None:
        return ""
    early_s = promise["early_seconds"]
    if promise["kept"]:
        return f" The quoted end was kept, {duration(early_s)} early."
    return f" The quoted end was missed, by {duration(-early_s)}." if early_s < 0 else " The quoted end was not kept."


def cost_objects(costs: "Sequence[DayCost]") -> list[dict[str, Any]]:
    """Costs as JSON objects."""
    return [{**of._asdict(), **cost._asdict(), "day": _day(of.day)} for of, cost in costs]


def cost_lines(costs: "Sequence[DayCost]") -> Iterator[str]:
    """Costs as a table, with the sum of each day."""
    columns = ("device s", "share", "prefill tokens", "decode tokens")
    yield f"{'day':<12}{'key':<18}{'work':<8}" + "".join(f"{name:>16}" for name in columns)
    for day in dict.fromkeys(of.day for of, _ in costs):
        of_day = [(of, cost) for of, cost in costs if of.day == day]
        whole_s = sum(cost.device_s for _, cost in of_day)
        for of, cost in of_day:
            numbers = f"{cost.device_s:>16,.1f}{cost.device_s / (whole_s or 1.0):>16.1%}"
            numbers += f"{cost.prefill_tokens:>16,}{cost.decode_tokens:>16,}"
            yield f"{_day(day):<12}{of.key or '(no key)':<18}{of.work:<8}{numbers}"
        yield f"{_day(day):<12}{'all':<18}{'':<8}{whole_s:>16,.1f}"


def _day(day: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(day * DAY_S))
