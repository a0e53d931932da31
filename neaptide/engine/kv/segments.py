"""Prefix segments: what requests of one job share of their prompts, and how many of them still want it."""

from collections.abc import Callable, Sequence

OWN_DEPTH_TOKENS = 1 << 62
"""Of what a request shares with none: it reaches as far as the request does."""
NEXT = 0
"""The use of what a preempted request wants: it is handed out before all that is planned."""


def unplanned() -> None:
    """No plan says when a segment comes again."""


class Segment:
    """A stretch of prompts that the same requests want: from where its parent ends to its own depth.

    Expected reuse is counted here and not per block: one file of 50,000 lines would mean millions of counts.
    """

    __slots__ = ("cached", "depth_tokens", "head_hashes", "next_use", "num_returned", "num_wanting", "planned_use")

    def __init__(self, depth_tokens: int, num_wanting: int, planned_use: Callable[[], int | None] = unplanned) -> None:
        self.depth_tokens = depth_tokens
        """Where it ends, from the prompt's begin."""
        self.num_wanting = num_wanting
        """Requests without an end that have it in their prompts, in the pool or running."""
        self.cached: dict[int, None] = {}
        """Its blocks without a reader, first to go first. Only the block pool changes it."""
        self.head_hashes: list[bytes] = []
        """Of all full blocks from the prompt's begin to its end; empty until a request that wants it has had them
        computed. Requests of one segment have one salt."""
        self.num_returned = 0
        """Of those that want it, the preempted ones."""
        self.planned_use = planned_use
        """The first place in the plan of a request that waits and wants it; None without one."""
        self.next_use = planned_use()
        """That place when it was looked up last, which is between two steps: in a step nothing moves."""

    @property
    def present_use(self) -> int | None:
        """What ``next_use`` would be if it were looked up now."""
        return NEXT if self.num_returned else self.planned_use()


Path = tuple[Segment, ...]
"""The segments of one request, from the prompt's begin on; the last is its own."""


def own_segment() -> Segment:
    """What one request shares with none: its prompt's tail, and its output."""
    return Segment(OWN_DEPTH_TOKENS, 1)


def segments_of_blocks(path: Path, first: int, blocks: Sequence[int], block_size: int) -> list[Segment]:
    """For each of a request's blocks from number ``first`` on, the segment in which it ends."""
    segments: list[Segment] = []
    place = 0
    for number in range(first + 1, first + len(blocks) + 1):
        while path[place].depth_tokens < number * block_size:
            place += 1
        segments.append(path[place])
    return segments


def segment_after(path: Path, num_tokens: int, block_size: int) -> Segment | None:
    """The segment of the block that follows so many tokens, in whole blocks, of a request; None if it shares that block
    with none."""
    end = num_tokens + block_size
    return next((segment for segment in path[:-1] if segment.depth_tokens >= end), None)


def known_head(path: Path) -> list[bytes]:
    """Hashes of the first blocks of a request with these segments, as far as one before it had them computed."""
    return next((list(segment.head_hashes) for segment in reversed(path[:-1]) if segment.head_hashes), [])


def remember_head(path: Path, hashes: Sequence[bytes], block_size: int) -> None:
    """A request with these segments has hashes of all its full blocks: nobody computes those that it shares again."""
    for segment in path[:-1]:
        if not segment.head_hashes:
            segment.head_hashes = list(hashes[: segment.depth_tokens // block_size])
