"""One sentence that says why a chat was late."""

from collections.abc import Mapping

from neaptide.durations import duration
from neaptide.server.why.parts import Cause, TokenWait, WaitParts

LEAST_SHARE = 0.01
"""Share of the lateness below which a part is not told."""
_WORDS = {
    Cause.OTHER: "not recorded",
    Cause.ENGINE_GONE: "without an engine, which had ended",
    Cause.AGAIN: "preempted, and computing again what that dropped",
    Cause.MEMORY: "waiting for KV memory that other chats held",
    Cause.SLOTS: "waiting for a slot, all of which other requests had",
    Cause.MASKS: "waiting for masks of grammars",
    Cause.SLOW: "steps that took longer than predicted",
    Cause.BEFORE: "before the engine (reading, tokenization, checks)",
    Cause.AFTER: "from the engine to the client's connection",
    Cause.BETWEEN: "the engine between its steps",
    Cause.OWN: "its own prompt",
}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def sentence(wait: TokenWait, parts: WaitParts) -> str:
    """The lateness, what of it is batch work's, and the other parts, the largest first."""
    what = "its first token" if wait.first_token_s is not None else "its longest gap between tokens"
    took = f"{what} took {duration(wait.end_s - wait.start_s)} for a target of {duration(wait.target_s)}"
    if wait.late_s <= 0:
        return f"on time: {took}"
    begin, told = _told(wait, parts)
    return f"{begin}{': ' if told else ''}{', '.join(told)} ({took})"


def in_brief(wait: TokenWait, parts: WaitParts) -> str:
    """The lateness, what of it is batch work's, and the largest other part. For where a late wait's times stand too."""
    begin, told = _told(wait, parts)
    return ", ".join([begin, *told[:1]])


def _told(wait: TokenWait, parts: WaitParts) -> tuple[str, list[str]]:
    """The sentence's begin, and the other parts in words, the largest first."""
    late = parts.lateness(wait.late_s)
    begin = f"late by {duration(wait.late_s)}; {duration(late.pop(Cause.BATCH))} of it by batch work"
    told = sorted(late.items(), key=lambda item: -item[1])
    least_s = LEAST_SHARE * wait.late_s
    return begin, [f"{duration(part_s)} {_words(cause, parts)}" for cause, part_s in told if part_s >= least_s]


def largest(late: Mapping[Cause, float]) -> Cause:
    """The cause of most of a lateness."""
    return max(late, key=lambda cause: late[cause])


def _words(cause: Cause, parts: WaitParts) -> str:
    if cause is Cause.PROMPTS:
        return f"waiting for {_count(parts.num_prompts)} {'prompt' if parts.num_prompts == 1 else 'prompts'} before it"
    if cause is Cause.STREAMS:
        return f"the tokens of {_count(parts.num_streams)} running {'stream' if parts.num_streams == 1 else 'streams'}"
    return _WORDS[cause]


def _count(number: int) -> str:
    return _NUMBERS[number] if number < len(_NUMBERS) else f"{number:,}"
