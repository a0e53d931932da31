"""The memory that online requests will need until they end, as far as it can be foreseen."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray, largest
from neaptide.engine.request import Request
from neaptide.engine.scheduler.draft import Draft


class HeldOnline(NamedTuple):
    """The running online requests of a draft, with what they hold once its step is done."""

    tokens: IntArray
    """[requests] tokens in blocks."""
    lacking: IntArray
    """[requests] known tokens that are still to be computed."""
    num_output: IntArray
    most_left: IntArray
    """[requests] most further tokens of the answer."""
    cached: IntArray
    """[requests] of ``tokens``: those that the cache had, so that others may read them too."""
    block_size: int

    def own_tokens(self, num_blocks: int) -> FloatArray:
        """[requests] tokens that the end of each frees, if all hold so many blocks together."""
        num_shared = (-(-self.tokens // self.block_size)).sum() - num_blocks
        share = min(max(num_shared * self.block_size / max(self.cached.sum(), 1), 0.0), 1.0)
        return np.asarray(self.tokens - share * self.cached)


def held_online(draft: Draft) -> HeldOnline:
    """What the running online requests hold."""
    table, kv, rows = draft.table, draft.kv, draft.online_rows()
    admitted = draft.admitted(online=True)

    def column(seated: IntArray, of: Callable[[Request], int]) -> IntArray:
        return np.append(seated, np.array([of(request) for request in admitted], np.int64))

    lacking = column(table.total[rows] - table.computed[rows], kv.num_uncomputed)
    every = [*table.requests_of(rows), *admitted]
    # A decode's one token is not worth looking up whether it is scheduled.
    for place in np.flatnonzero(lacking > 1).tolist():
        lacking[place] -= draft.num_tokens_of(every[place])
    total = column(table.total[rows], lambda request: request.num_known_tokens)
    num_prompt = column(table.prompt[rows], lambda request: request.num_prompt_tokens)
    limit = column(table.limit[rows], lambda request: request.num_prompt_tokens + request.params.max_tokens)
    cached = [each.num_cached_tokens for each in every[: len(rows)]] + [kv.num_computed(each) for each in admitted]
    return HeldOnline(
        tokens=total - lacking,
        lacking=lacking,
        num_output=total - num_prompt,
        most_left=limit - total,
        cached=np.array(cached, np.int64),
        block_size=draft.block_size,
    )


def most_held_tokens(held_tokens: int, own_tokens: FloatArray, left_tokens: FloatArray) -> int:
    """The most tokens that some requests will hold at once if all go on together until each ends.

    Args:
        held_tokens: what they hold now, shared tokens counted once.
        own_tokens: [requests] what the end of each frees of it.
        left_tokens: [requests] what each will still get.
    """
    order = left_tokens.argsort()
    left, own = left_tokens[order], own_tokens[order]
    # When one ends, those with less left have ended, and all others have grown by as much as it.
    num_running = np.arange(len(left), 0, -1)
    freed = own.cumsum() - own
    return held_tokens + largest(left * num_running - freed)
