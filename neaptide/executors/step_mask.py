"""What a step asks of its requests' grammars, and what it is told."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from neaptide.engine.arrays import TokenArray
from neaptide.engine.steps.plan import StepPlan
from neaptide.engine.table import PLACEHOLDER_TOKEN_ID
from neaptide.executors.grammar_places import Bits, Follower
from neaptide.executors.recent_tokens import RecentTokens, SampledLater


@dataclass(slots=True)
class Constrained:
    """A request that samples in a step and has a grammar."""

    request_id: str
    follower: Follower
    output: TokenArray
    """[output tokens so far] of its own; the last may be a placeholder."""
    last: SampledLater | None
    """The token that the placeholder stands for, once it is sampled."""

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        part: int,
        follower: Follower,
        num_prompt_tokens: int,
        recent: RecentTokens[Any],
    ) -> "Constrained":
        """A part of a plan that samples."""
        position = int(plan.output_position[part])
        # A copy: when it is read, the row may be another's.
        output = plan.table.tokens[plan.rows[part], num_prompt_tokens : num_prompt_tokens + position].copy()
        return cls(plan.request_ids[part], follower, output, recent.at(position - 1))

    @property
    def waits(self) -> bool:
        """An earlier step still samples the last token."""
        return self.last is not None and len(self.output) > 0 and self.output[-1] == PLACEHOLDER_TOKEN_ID

    def tokens(self) -> TokenArray:
        """Waits for the step that samples the last one."""
        if self.waits and self.last is not None:
            self.output[-1] = self.last.wait()
        return self.output


@dataclass(slots=True)
class StepMask:
    """What a step's grammars allow."""

    bits: Bits
    """[constrained requests, ceil(vocabulary / 32)]: token t is bit t % 32 of word t // 32."""
    request_ids: list[str]
    errors: dict[str, str] = field(default_factory=dict)
    """Requests that failed on their own; their bits are all set."""
    late: dict[str, float] = field(default_factory=dict)
    """Requests whose masks were not there in time, and for how many seconds it is no use to ask again; likewise."""
    waited_s: float = 0.0
    """Seconds spent waiting for masks alone."""


class Patience(NamedTuple):
    """How long a step waits for its masks."""

    most_s: float
    """Longest wait for all masks, in seconds."""
    is_alone: bool
    """Whether the step can sample nothing without these masks."""
    alone_s: float
    """Longest wait of such a step for the first of its masks, in seconds."""
    is_wanted: Callable[[], bool] | None = None
    """Whether another request waits for the device: it ends the wait of a step that ``is_alone``."""
