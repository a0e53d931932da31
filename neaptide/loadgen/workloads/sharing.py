"""How much of their prompts requests share."""

from collections.abc import Iterable
from dataclasses import dataclass

from neaptide.loadgen.workloads.traces import Segments


@dataclass(slots=True, frozen=True)
class Sharing:
    """What a prefix cache without limit saves of a set's prompts."""

    tokens: int
    unique_tokens: int
    """What must be computed: the tokens of the prefix tree."""

    @property
    def ratio(self) -> float:
        """1 - unique/total: BatchLLM, Equation 2."""
        return 1 - self.unique_tokens / self.tokens if self.tokens else 0.0


def prefix_sharing(prompts: Iterable[Segments], block_size: int = 1) -> Sharing:
    """The prefix tree of the prompts, counted in whole blocks as a block-hashed cache keeps them.

    A block is shared by the prompts that are equal up to its end; the tokens after a prompt's last whole block are
    shared by none. With a block size of 1 the unique tokens are the tree's own.
    """
    tokens = unique = 0
    nodes: dict[tuple[int, int, int], int] = {}  # (parent, content, tokens) -> node
    reach: dict[tuple[int, int], tuple[int, int]] = {}  # (parent, content) -> (first token, end of the longest)
    for segments in prompts:
        parent = start = 0
        for content, length in segments:
            first, end = reach.get((parent, content), (start, start))
            reach[parent, content] = (first, max(end, start + length))
            parent = nodes.setdefault((parent, content, length), len(nodes) + 1)
            start += length
        tokens += start
        unique += start % block_size
    unique += sum(block_size * (end // block_size - first // block_size) for first, end in reach.values())
    return Sharing(tokens, unique)
