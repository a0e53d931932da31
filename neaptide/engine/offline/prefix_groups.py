"""What sharing prompt prefixes saves, in tokens that need not be computed again.

A prefix tree's inner nodes are text that several prompts share; every leaf is one prompt. With *single-level* sharing,
as BatchLLM (arXiv 2412.03594) schedules it, each prompt belongs to one group at most, which computes one prefix once.
With *multi-level* sharing every node is computed once. The functions here recurse: trees of some hundred levels.
"""

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class PrefixNode:
    """A node of a compact prefix tree; the root stands for no text."""

    tokens: int
    """Its own, beyond its parent's."""
    children: tuple["PrefixNode", ...] = ()

    @property
    def leaves(self) -> int:
        return sum(child.leaves for child in self.children) if self.children else 1


def saving_ratio(prefix_tokens: int, own_tokens: int, sharing_degree: int, block_size: int = 1) -> float:
    """Share of prompt tokens that need not be computed when groups of ``sharing_degree`` share a prefix.

    BatchLLM, equation 2, for equal groups: ``(k - 1)/k * P/(P + O)``. A cache of whole blocks shares only
    ``floor(P / block_size) * block_size`` tokens of the prefix.
    """
    shared_tokens = prefix_tokens // block_size * block_size
    return (sharing_degree - 1) * shared_tokens / (sharing_degree * (prefix_tokens + own_tokens))


def first_level_saving(root: PrefixNode) -> int:
    """Tokens saved when the prompts below each child of the root share that child's text and nothing more."""
    return sum((child.leaves - 1) * child.tokens for child in root.children)


def enlarge_first_level(root: PrefixNode) -> PrefixNode:
    """BatchLLM, Algorithm 1: text of deeper levels moves into the first one where that gains more than it costs.

    Bottom up, a grandchild is forked off, with a copy of the child's text, if ``(leaves - 1) * tokens`` of the
    grandchild exceeds the child's tokens. As published: the last fork out of a child is charged too, although the
    child, left empty, then costs nothing.
    """
    children: list[PrefixNode] = []
    for child in map(enlarge_first_level, root.children):
        kept: list[PrefixNode] = []
        for grandchild in child.children:
            if (grandchild.leaves - 1) * grandchild.tokens > child.tokens:
                children.append(PrefixNode(child.tokens + grandchild.tokens, grandchild.children))
            else:
                kept.append(grandchild)
        if kept or not child.children:
            children.append(PrefixNode(child.tokens, tuple(kept)))
    return PrefixNode(root.tokens, tuple(children))


def greedy_saving(root: PrefixNode) -> int:
    """Tokens that single-level groups after BatchLLM's Algorithm 1 save."""
    return first_level_saving(enlarge_first_level(root))


def best_single_level_saving(root: PrefixNode) -> int:
    """Most tokens that single-level groups can save; O(nodes x depth).

    A set of nodes is opened; each prompt uses its deepest open ancestor u, and an open node is computed once:
    ``sum over prompts of depth(u) - sum over open nodes of depth``, depth in tokens from the root. Exact, by
    ``F(v, d) = max(sum_c F(c, d), sum_c F(c, depth(v)) - depth(v))`` and ``F(leaf, d) = d``.
    """
    return sum(_best_by_ancestor(child, [0])[0] for child in root.children)


def _best_by_ancestor(node: PrefixNode, ancestor_depths: list[int]) -> list[int]:
    """F(node, d) for every depth d that the deepest open ancestor may have; the last one is the parent's."""
    if not node.children:
        return ancestor_depths
    depth = ancestor_depths[-1] + node.tokens
    below = [_best_by_ancestor(child, [*ancestor_depths, depth]) for child in node.children]
    *closed, opened = (sum(values) for values in zip(*below, strict=True))
    return [max(value, opened - depth) for value in closed]


def multi_level_saving(root: PrefixNode) -> int:
    """Tokens saved when every node is computed once, whatever its level."""
    below = sum(multi_level_saving(child) for child in root.children)
    return below + (root.leaves - 1) * root.tokens
