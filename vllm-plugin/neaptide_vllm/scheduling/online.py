"""Online requests inside vLLM: which they are, their targets, and when their tokens are due."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from neaptide.engine.deadlines import first_token_due_s, later_token_due_s

if TYPE_CHECKING:
    from vllm.v1.request import Request

TARGETS = ("ttft_ms", "tpot_ms")
"""Names of a request's targets in ``vllm_xargs``."""


def is_offline(request: "Request") -> bool:
    """Whether a request has no latency target: its priority is above 0."""
    return bool(request.priority > 0)


class Online:
    """An online request with its targets; implements ``OnlineRequest``. Times are in the scheduler's clock."""

    __slots__ = ("arrival_s", "cached_tokens", "first_token_s", "looked_up_s", "request", "tpot_slo_s", "ttft_slo_s")

    def __init__(self, request: "Request", arrival_s: float, ttft_slo_s: float, tpot_slo_s: float) -> None:
        self.request = request
        self.arrival_s = arrival_s
        self.ttft_slo_s = ttft_slo_s
        self.tpot_slo_s = tpot_slo_s
        self.first_token_s = math.inf
        """When its first token was sampled; infinite before."""
        self.cached_tokens = 0
        """Tokens that the prefix cache had when it was looked up last."""
        self.looked_up_s = -math.inf

    def begin_turn(self, now_s: float) -> None:
        """A session goes on with another prompt under the same id."""
        self.arrival_s, self.first_token_s, self.looked_up_s = now_s, math.inf, -math.inf

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.request.num_prompt_tokens)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, with one that a step in flight samples."""
        request = self.request
        return int(request.num_output_tokens) + int(request.num_output_placeholders > 0)

    @property
    def next_deadline_s(self) -> float:
        """Deadline of its next token."""
        num_output = self.num_output_tokens
        if num_output == 0:
            return first_token_due_s(self.arrival_s, self.ttft_slo_s)
        if math.isinf(self.first_token_s):  # a step in flight samples it
            return first_token_due_s(self.arrival_s, self.ttft_slo_s) + self.tpot_slo_s
        return later_token_due_s(self.first_token_s, num_output, self.tpot_slo_s, 0.0)


def target_s(arguments: Mapping[str, Any] | None, name: str, default_s: float) -> float:
    """A target in seconds that a request names in ``vllm_xargs``, or the default if it names none that is possible."""
    try:
        return target_ms((arguments or {})[name]) / 1e3
    except (KeyError, ValueError):
        return default_s


def target_ms(value: object) -> float:
    """A target in milliseconds, as a request names it.

    Raises:
        ValueError: it is not a positive number, nor the text of one.
    """
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not 0.0 < number < math.inf:
        raise ValueError("a target must be a positive number of milliseconds")
    return number
