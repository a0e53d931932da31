"""The demo's arithmetic: the batch's size, and the benefit of co-serving in one sentence."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neaptide.commands.demo.load import DemoLoad
from neaptide.loadgen.client.batches import TERMINAL

LEAST_LINES, MOST_LINES = 4, 20_000
NOTHING_WON = 1.05
"""Ratio of time in turn to time together up to which the difference is noise."""
PAID = 0.05
"""Loss of chat attainment above which the sentence says that the chats paid."""


def lines_for(seconds: float, batch_alone_per_s: float, chat_per_s: float, line_tokens: Sequence[int]) -> int:
    """Number of lines that take ``seconds`` in the capacity that chat leaves; costs of lines repeat as in
    ``line_tokens``."""
    if not batch_alone_per_s > 0.0 or not line_tokens:
        return LEAST_LINES
    left_per_s = max(batch_alone_per_s - chat_per_s, 0.1 * batch_alone_per_s)
    lines = seconds * left_per_s / (sum(line_tokens) / len(line_tokens))
    return min(max(round(lines), LEAST_LINES), MOST_LINES)


@dataclass(slots=True, frozen=True)
class DemoFigures:
    """Measurements of both tiers in this run."""

    together_s: float
    """Duration of the batch next to chat."""
    batch_tokens: float
    """Tokens that the engine computed for the batch in that time."""
    batch_alone_per_s: float
    """Tokens per second of such a batch without chat."""
    met_alone: int
    chats_alone: int
    met_beside: int
    chats_beside: int

    @property
    def batch_alone_s(self) -> float:
        """Duration of the same batch without chat."""
        return self.batch_tokens / self.batch_alone_per_s if self.batch_alone_per_s > 0.0 else math.nan

    @property
    def in_turn_over_together(self) -> float:
        """Time in turn over time together. In turn means the same time of chat alone, because users choose their
        arrivals, and then the batch alone."""
        return (self.together_s + self.batch_alone_s) / self.together_s

    @property
    def chats_paid(self) -> bool:
        if not self.chats_alone or not self.chats_beside:
            return False
        return self.met_alone / self.chats_alone - self.met_beside / self.chats_beside > PAID


def sentence(measured: DemoFigures) -> str:
    """The benefit of co-serving compared with serving both in turn, or that there is none."""
    if math.isnan(measured.batch_alone_s):
        return "The benefit of co-serving is unknown: the batch's speed without chat could not be measured."
    in_turn_s = measured.together_s + measured.batch_alone_s
    times = (
        f"{measured.together_s:.1f} s together, {in_turn_s:.1f} s in turn "
        f"({measured.together_s:.1f} s of chat, then the batch alone for {measured.batch_alone_s:.1f} s)"
    )
    chats = (
        f"{measured.met_beside} of {measured.chats_beside} chats within both targets with the batch and "
        f"{measured.met_alone} of {measured.chats_alone} without it"
    )
    if measured.in_turn_over_together <= NOTHING_WON:
        return f"Co-serving had no benefit on this machine: {times}, with {chats}."
    saved = 1.0 - 1.0 / measured.in_turn_over_together
    won = f"Co-serving saved {100 * saved:.0f}% of the time that chat and batch need one after the other"
    return f"{won}{', but more chats missed their targets' if measured.chats_paid else ''}: {times}, with {chats}."


def unfinished(batch: Mapping[str, Any], elapsed_s: float) -> str:
    """How far a batch came that was not completed, and what to try next."""
    counts = batch["request_counts"]
    said = (
        f"the batch is {batch['status']} after {elapsed_s:.0f} s, {counts['completed']} of {counts['total']} lines done"
    )
    if batch["status"] in TERMINAL:
        return said
    return f"{said}: the machine is busy or slow; try --max-seconds {max(300, round(4 * elapsed_s, -2)):.0f}"


def scaled(load: DemoLoad) -> str:
    """Line that tells the load of a slow machine, before the load runs."""
    return (
        f"this machine is slow for this model: {load.rate_per_s:.2g} chats/s of at most {load.max_tokens} tokens, with "
        f"targets of {load.ttft_slo_ms:,.0f} ms to the first token and {load.tpot_slo_ms:,.0f} ms for each further one"
    )


def too_slow(max_seconds: float) -> str:
    """What to try where not even one chat ended."""
    return (
        f"not one chat ended within {max_seconds / 2:.0f} s on the idle server: the machine is busy, or too "
        f"slow for this model; try --max-seconds {5 * max_seconds:.0f}, or a smaller model"
    )
