"""The sparse end of an order by density, long and short answers mixed (ours).

By density the longest answers come first. They start together, are longest together and end together: memory is half
full on average, and when the short ones come nothing is left to put between them. Mixed evenly, some end in every step
and others take their place. Only what is to start last goes by length, the longest first, so that all end together.
"""

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.engine.offline.planning.blend import PoolWork, Ranked
from neaptide.engine.offline.prefix_tree import NO_NODE, PrefixTree

GOLDEN = 0.6180339887498949
"""Multiples of it, less their whole parts, lie evenly however many there are."""
MIN_ROWS = 8
"""Least length of a run of rows in which the order matters."""
LARGE_SHARE, MAX_LOST = 0.07, 0.1
"""Share of the memory from which a prompt is large: it finds no room once memory is full. If it shares no more than the
second share of its own tokens, it comes first."""
LAST_SHARE = 0.25
"""Share of what memory reads while the longest answer lasts, in the answers that go by length."""


def spread(ranked: Ranked, tree: PrefixTree, work: PoolWork, kv_tokens: int) -> Ranked:
    """The same order, but for large prompts, and for rows of the sparse end that may change places without a token less
    shared: neighbours with one prefix, whichever pieces it was parted into, or with none. Such a run is one piece."""
    node, depth_tokens = np.full(len(work.prompt_tokens), NO_NODE), np.append(tree.depth_tokens, 0)
    node[tree.rows] = tree.node
    node = node[ranked.rows]
    lasting = work.output_tokens[ranked.rows]
    own_tokens = work.prompt_tokens[ranked.rows] - depth_tokens[node]
    held = own_tokens + lasting / 2.0
    is_sparse = ranked.compute_s < ranked.root_density * ranked.memory_s
    begins = (np.diff(node, prepend=NO_NODE - 1) != 0) | ~is_sparse | ~np.append(False, is_sparse[:-1])
    bounds = np.append(np.flatnonzero(begins), len(node))
    order, shared_tokens, piece = np.arange(len(node)), ranked.shared_tokens.copy(), ranked.piece.copy()
    for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if end - first >= MIN_ROWS:
            run = slice(first, end)
            last_tokens = LAST_SHARE * kv_tokens * float(lasting[run].max())
            order[run] = first + _mixed(lasting[run], (lasting * held)[run], last_tokens)
            shared_tokens[first + 1 : end], piece[run] = depth_tokens[node[first]], piece[first]
    is_large = ~is_sparse & (own_tokens >= LARGE_SHARE * kv_tokens) & (depth_tokens[node] <= MAX_LOST * own_tokens)
    if kv_tokens and is_large.any():
        first = np.argsort(~is_large, kind="stable")
        order, piece = order[first], np.where(is_large, -1 - np.cumsum(is_large), piece)[first]
        shared_tokens = np.where(np.diff(piece, prepend=piece[0]) != 0, 0, np.where(is_large, 0, shared_tokens)[first])
    rows = ranked.rows[order]
    tokens = work.prompt_tokens[rows] + work.output_tokens[rows]
    compute_s = work.compute_s[rows] * (1.0 - shared_tokens / tokens)
    return Ranked(rows, shared_tokens, compute_s, work.memory_s[rows], piece)


def _mixed(lasting: FloatArray, read_tokens: FloatArray, last_tokens: float) -> IntArray:
    """Which row stands where; they are taken from the back."""
    by_length = np.argsort(-lasting, kind="stable")
    turns = by_length[np.argsort(np.arange(1, len(lasting) + 1) * GOLDEN % 1.0, kind="stable")]
    left_tokens = np.cumsum(read_tokens[turns][::-1])[::-1]
    num_mixed = int(np.searchsorted(-left_tokens, -last_tokens))
    last = turns[num_mixed:]
    last = last[np.argsort(-lasting[last], kind="stable")]
    return np.concatenate((turns[:num_mixed], last))[::-1]
