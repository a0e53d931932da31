"""Grammar requests of a step, and the masks it receives."""

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
    """A request with a grammar that samples in a step."""

    request_id: str
    follower: Follower
    output: TokenArray
    """[output tokens so far] The request's own output; the last may be a placeholder."""
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
        """The request of a sampling part of a plan."""
        position = int(plan.output_position[part])
        # A copy: later the slot may belong to another request.
        output = plan.table.tokens[plan.rows[part], num_prompt_tokens : num_prompt_tokens + position].copy()
        return cls(plan.request_ids[part], follower, output, recent.at(position - 1))

    @property
    def waits(self) -> bool:
        """Whether an earlier step still samples the last token."""
        return self.last is not None and len(self.output) > 0 and self.output[-1] == PLACEHOLDER_TOKEN_ID

    def tokens(self) -> TokenArray:
        """The output, after waiting for the step that samples its last token."""
        if self.waits and self.last is not None:
            self.output[-1] = self.last.wait()
        return self.output


@dataclass(slots=True)
class StepMask:
    """The masks of a step."""

    bits: Bits
    """[constrained requests, ceil(vocabulary / 32)] Token t is bit t % 32 of word t // 32."""
    request_ids: list[str]
    errors: dict[str, str] = field(default_factory=dict)
    """Requests that failed by themselves; all their bits are set."""
    late: dict[str, float] = field(default_factory=dict)
    """Requests whose masks were late, with the seconds to wait before asking again; all their bits are set."""
    waited_s: float = 0.0
    """Seconds spent waiting for masks only."""


class Patience(NamedTuple):
    """How long a step waits for its masks."""

    most_s: float
    """Longest wait for all masks, in seconds."""
    is_alone: bool
    """Whether the step can sample nothing without these masks."""
    alone_s: float
    """Longest wait of such a step for the first of its masks, in seconds."""
    is_wanted: Callable[[], bool] | None = None
    """Whether another request waits for the device. It ends the wait of a step that ``is_alone``."""
