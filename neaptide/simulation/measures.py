"""What a simulation measures. docs/simulate-plan-loadtest.md defines every quantity, with the symbols used here."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neaptide.engine.messages import RequestOutput, StepOutputs, StepStats
from neaptide.engine.params import FinishReason
from neaptide.executors.simulated.trace_executor import StepTally

Window = tuple[float, float]
CLOCK_ERROR_S = 1e-9
"""Tolerance for durations: differences of clock readings have rounding noise."""


@dataclass(slots=True)
class OnlineRecord:
    """What a client observed of one online request."""

    arrival_s: float
    first_s: float = math.inf
    last_s: float = math.inf
    tokens: int = 0
    is_done: bool = False
    lag_s: float = -math.inf
    """From arrival: ``t_k - a - (k - 1) * TPOT`` of the most delayed token k. At most TTFT if every token met Echo's
    deadline."""

    def ttft_s(self, end_s: float) -> float:
        """TTFT; for a request without a first token, the time waited until the end of the run."""
        return min(self.first_s, end_s) - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per further token; None without a second token."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None

    def began_in_time(self, ttft_slo_s: float) -> bool:
        return self.first_s - self.arrival_s <= ttft_slo_s + CLOCK_ERROR_S

    def kept_pace(self, tpot_slo_s: float) -> bool:
        return self.tpot_s is None or self.tpot_s <= tpot_slo_s + CLOCK_ERROR_S

    def has_missed(self, now_s: float, ttft_slo_s: float, tpot_slo_s: float) -> bool:
        """Whether the request can no longer meet both targets."""
        has_begun = self.tokens > 0
        is_late = not self.began_in_time(ttft_slo_s) if has_begun else self.ttft_s(now_s) > ttft_slo_s + CLOCK_ERROR_S
        return is_late or (self.is_done and not self.kept_pace(tpot_slo_s))


STEP_COLUMNS = (
    "end_s",
    "duration_s",
    "predicted_s",
    "margin_s",
    "computed_tokens",
    "prefill_tokens",
    "prompt_tokens",
    "output_tokens",
    "again_tokens",
    "cached_tokens",
    "admitted_tokens",
    "free_blocks",
    "cached_blocks",
    "online_blocks",
    "offline_blocks",
    "online_cached_tokens",
    "online_admitted_tokens",
    "preempted_online",
    "preempted_offline",
    "recomputed_tokens",
    "swapped_blocks",
)
"""Columns of one row per step. Tokens are those of offline requests, except for names with online and for
``again_tokens`` and ``recomputed_tokens``."""


class OutOfReach(Exception):
    """Too many online requests have missed a target for the run to continue."""


class Measures:
    """Collects measurements; ``neaptide.simulation.result`` reduces them to numbers.

    Args:
        tpot_slo_s: time per token that deadlines from arrival assume.
    """

    def __init__(self, tpot_slo_s: float = 0.0) -> None:
        self._tpot_slo_s = tpot_slo_s
        self.online: dict[str, OnlineRecord] = {}
        self.itl_s = array("d")
        """Gaps between the tokens of all online requests."""
        self._steps = array("d")
        self.offline_ends_s = array("d")
        self.longest_offline_wait_s = 0.0
        """Longest time from a row's submission to its first step, over rows that have started."""
        self.num_steps = 0

    @classmethod
    def merged(cls, parts: Sequence["Measures"], tpot_slo_s: float) -> "Measures":
        """The measurements of several engines, as if they had been one."""
        whole = cls(tpot_slo_s)
        for part in parts:
            whole.online |= part.online
            whole.itl_s.extend(part.itl_s)
            whole._steps.extend(part._steps)
            whole.offline_ends_s.extend(part.offline_ends_s)
            whole.longest_offline_wait_s = max(whole.longest_offline_wait_s, part.longest_offline_wait_s)
            whole.num_steps += part.num_steps
        return whole

    def arrived(self, request_id: str, arrival_s: float) -> None:
        self.online[request_id] = OnlineRecord(arrival_s)

    def step(self, outputs: StepOutputs, tally: StepTally, swapped_blocks: int, now_s: float) -> list[RequestOutput]:
        """Records a step's outputs at its end. Returns the ends of offline requests.

        Args:
            swapped_blocks: blocks that the step copied to or from host memory, whole or in part.
        """
        for stats in outputs.stats:
            self._add_step(stats, tally, swapped_blocks)
        ended: list[RequestOutput] = []
        online, gaps_s, tpot_slo_s = self.online, self.itl_s, self._tpot_slo_s
        for output in outputs.outputs:
            record = online.get(output.request_id)
            if record is None:
                ended.append(output)
                continue
            if output.new_token_ids or output.stop_token_id is not None:
                if record.tokens:
                    gaps_s.append(now_s - record.last_s)
                else:
                    record.first_s = now_s
                record.last_s = now_s
                lag_s = now_s - record.arrival_s - record.tokens * tpot_slo_s
                if lag_s > record.lag_s:
                    record.lag_s = lag_s
                record.tokens += 1
            if output.finish_reason is not None:
                record.is_done = output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        return ended

    def check_reach(self, now_s: float, ttft_slo_s: float, most_missed: int) -> None:
        """Stops the run if too many online requests have missed.

        Raises:
            OutOfReach: more online requests than ``most_missed`` can no longer meet both targets.
        """
        records = self.online.values()
        num_missed = sum(record.has_missed(now_s, ttft_slo_s, self._tpot_slo_s) for record in records)
        if num_missed > most_missed:
            raise OutOfReach(f"{num_missed} online requests have missed a target by {now_s:.1f} s")

    def offline_started(self, wait_s: float) -> None:
        self.longest_offline_wait_s = max(self.longest_offline_wait_s, wait_s)

    def offline_ended(self, now_s: float) -> None:
        self.offline_ends_s.append(now_s)

    def steps(self, window_s: Window) -> dict[str, npt.NDArray[np.float64]]:
        """Columns of the steps that ended within the window, including its end."""
        table = np.array(self._steps).reshape(-1, len(STEP_COLUMNS))
        inside = (table[:, 0] > window_s[0]) & (table[:, 0] <= window_s[1])
        return dict(zip(STEP_COLUMNS, table[inside].T, strict=True))

    def _add_step(self, stats: StepStats, tally: StepTally, swapped_blocks: int) -> None:
        self.num_steps += 1
        if stats.is_aborted:
            return  # an aborted step has no results, and its time does not test the prediction
        self._steps.extend(
            (
                stats.now_s,
                stats.duration_s,
                stats.predicted_s,
                stats.margin_s,
                stats.offline_prefill_tokens + stats.offline_decode_tokens,
                tally.offline_prefill_tokens,
                tally.offline_prompt_tokens,
                tally.offline_output_tokens,
                tally.again_tokens,
                stats.cached_tokens - stats.online_cached_tokens,
                stats.admitted_prompt_tokens - stats.online_admitted_prompt_tokens,
                stats.blocks_free,
                stats.blocks_cached,
                stats.blocks_online,
                stats.blocks_offline,
                stats.online_cached_tokens,
                stats.online_admitted_prompt_tokens,
                stats.preempted_online,
                stats.preempted_offline,
                stats.recomputed_tokens,
                swapped_blocks,
            )
        )
