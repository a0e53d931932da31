"""Prefix nodes: shared prompt prefixes of a job's requests, with the number of requests that still need them."""

from collections.abc import Callable, Sequence

OWN_DEPTH_TOKENS = 1 << 62
"""Depth of a node of one request alone, which extends as far as the request."""
NEXT = 0
"""Next use of a node that a preempted request needs: it resumes before all planned requests."""


def unplanned() -> None:
    """Next use of a node without a plan."""


class PrefixNode:
    """A node of the prefix tree: the prompt tokens from its parent's end to its own depth, which the same requests
    share.

    Expected reuse is counted per node, not per block: one file of 50,000 lines would have millions of counts.
    """

    __slots__ = ("cached", "depth_tokens", "head_hashes", "next_use", "num_returned", "num_wanting", "planned_use")

    def __init__(self, depth_tokens: int, num_wanting: int, planned_use: Callable[[], int | None] = unplanned) -> None:
        self.depth_tokens = depth_tokens
        """End of the node, counted from the prompt's start."""
        self.num_wanting = num_wanting
        """Number of open requests with this node in their prompts, waiting or running."""
        self.cached: dict[int, None] = {}
        """Its blocks without a reader, in order of eviction. Only the block pool changes it."""
        self.head_hashes: list[bytes] = []
        """Hashes of all full blocks from the prompt's start to the node's end; empty until a request has computed them.
        Requests of one node have one salt."""
        self.num_returned = 0
        """Number of preempted requests that need it."""
        self.planned_use = planned_use
        """First place in the plan of a waiting request that needs it; None without one."""
        self.next_use = planned_use()
        """``present_use`` at the last update, which is between steps: within a step it must not change."""

    @property
    def present_use(self) -> int | None:
        """The current next use."""
        return NEXT if self.num_returned else self.planned_use()


Path = tuple[PrefixNode, ...]
"""Prefix nodes of one request, from the prompt's start on; the last is its own."""


def own_node() -> PrefixNode:
    """Node for the tokens that one request alone has: its prompt's tail, and its output."""
    return PrefixNode(OWN_DEPTH_TOKENS, 1)


def nodes_of_blocks(path: Path, first: int, blocks: Sequence[int], block_size: int) -> list[PrefixNode]:
    """The prefix node in which each of the blocks ends; ``blocks`` are the request's blocks from index ``first`` on."""
    prefix_nodes: list[PrefixNode] = []
    place = 0
    for number in range(first + 1, first + len(blocks) + 1):
        while path[place].depth_tokens < number * block_size:
            place += 1
        prefix_nodes.append(path[place])
    return prefix_nodes


def node_after(path: Path, num_tokens: int, block_size: int) -> PrefixNode | None:
    """The prefix node of the block after the first ``num_tokens`` tokens, which fill whole blocks. None if the request
    shares that block with no other."""
    end = num_tokens + block_size
    return next((prefix_node for prefix_node in path[:-1] if prefix_node.depth_tokens >= end), None)


def known_head(path: Path) -> list[bytes]:
    """Hashes of the first blocks of a request with these prefix nodes, as far as an earlier request has computed
    them."""
    return next((list(prefix_node.head_hashes) for prefix_node in reversed(path[:-1]) if prefix_node.head_hashes), [])


def remember_head(path: Path, hashes: Sequence[bytes], block_size: int) -> None:
    """Keeps the hashes of a request's full blocks in its prefix nodes, so that no request computes them again."""
    for prefix_node in path[:-1]:
        if not prefix_node.head_hashes:
            prefix_node.head_hashes = list(hashes[: prefix_node.depth_tokens // block_size])
