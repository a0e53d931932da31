"""Policies with their own limits: ``priority@1536`` or ``priority@1536x512`` on the command line."""

import re
from dataclasses import dataclass, replace

from neaptide.engine.scheduler.policies import find_policy
from neaptide.simulation.scenario import Scenario

POINT = re.compile(r"(?P<policy>[^@]+)(@(?P<step_tokens>\d+)(x(?P<seats>\d+))?)?")


@dataclass(slots=True, frozen=True)
class PolicyPoint:
    """A policy with its limits; None keeps the scenario's limit."""

    policy: str
    step_tokens: int | None = None
    seats: int | None = None

    def __str__(self) -> str:
        limits = [str(limit) for limit in (self.step_tokens, self.seats) if limit is not None]
        return "@".join((self.policy, "x".join(limits))) if limits else self.policy

    def of(self, scenario: Scenario) -> Scenario:
        """The scenario under this policy."""
        return replace(
            scenario,
            policy=self.policy,
            max_num_batched_tokens=self.step_tokens or scenario.max_num_batched_tokens,
            max_num_seqs=self.seats or scenario.max_num_seqs,
        )


def parse_points(text: str) -> list[PolicyPoint]:
    """Parses ``a,b@1536,c@2048x512``.

    Raises:
        ValueError: the policy cannot be used, or a limit is invalid.
    """
    return [_parse(part) for part in text.split(",")]


def _parse(text: str) -> PolicyPoint:
    match = POINT.fullmatch(text)
    if match is None:
        raise ValueError(f"--policy must be NAME, NAME@STEP_TOKENS or NAME@STEP_TOKENSxSLOTS, not {text!r}")
    find_policy(match["policy"])
    step_tokens, seats = (None if match[name] is None else int(match[name]) for name in ("step_tokens", "seats"))
    if 0 in (step_tokens, seats):
        raise ValueError(f"the limits of {text!r} must be at least 1")
    return PolicyPoint(match["policy"], step_tokens, seats)
