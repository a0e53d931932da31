"""Protocols between a scheduler and the judgement. Our draft and the scheduler inside vLLM implement them."""

from typing import NamedTuple, Protocol

from neaptide.engine.arrays import IntArray
from neaptide.engine.scheduler.budget import Reads, StepBudget
from neaptide.engine.table import Streams


class Candidate(NamedTuple):
    """A step length that was compared with others."""

    kind: str
    """``prompts`` or ``offline``: whose work the length is for."""
    length_s: float
    num_late: float
    """Expected late requests."""
    value: float | None = None
    """Seconds of offline work less the price of late requests, for each second."""
    term: str = ""
    """Which of them are the most: ``prompts`` that wait, ``streams`` or ``arrivals`` to come. Only of a chosen length;
    empty if none is expected."""


class OnlineRequest(Protocol):
    """A request with latency targets. Equal only to itself."""

    @property
    def arrival_s(self) -> float: ...

    @property
    def ttft_slo_s(self) -> float: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def next_deadline_s(self) -> float:
        """Deadline of its next token."""
        ...

    def __hash__(self) -> int: ...


class JudgedStep(Protocol):
    """A step that is being planned."""

    budget: StepBudget
    candidates: list[Candidate]
    """Step lengths that were compared."""
    chosen: list[Candidate]
    """The best of them for each kind of work."""
    num_parts: int
    """Scheduled requests so far."""
    is_abortable: bool
    """Whether an online arrival may abort the step."""
    arrival_waits_s: float
    """Time before the step's end in which an arrival waits for it instead of aborting it."""

    @property
    def now_s(self) -> float:
        """When the step begins."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        ...

    def streams(self) -> Streams:
        """Online requests with output that will have more."""
        ...

    def stream_reads(self) -> Reads:
        """Reads of ``streams`` (at least one) if each lacked one token."""
        ...

    def offline_contexts(self) -> IntArray:
        """[decodes] computed tokens of offline requests that lack one token and are not scheduled yet."""
        ...
