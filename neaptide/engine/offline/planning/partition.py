"""A pool parted for several replicas: equal compute, equal memory time, so equal density; little sharing lost."""

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.engine.offline.planning.blend import Ranked

TOLERANCE = 0.005
"""No replica's compute or memory time is further above its share, unless nothing can be cut any more."""
POWER = 8
"""Of loads whose sum a piece should raise least: nearly the largest load alone, but the lesser one of the two times
counts too. By the largest alone that one drifts, and pieces are cut for an evenness that cutting does not bring: four
parts of BlendServe's trace 1 were uneven by 1.4% and lost 1.2% of the sharing, here 0.3% and 0.5%."""
MAX_ROUNDS = 12
MIDDLE = 0.2
"""A piece is cut within so much of its rows around the middle, where the fewest tokens are shared."""


def partition(ranked: Ranked, num_replicas: int) -> list[IntArray]:
    """Places in ``ranked`` of each replica's rows, ascending.

    Whole pieces, the largest first, each to the replica that it burdens least in both times: what shares stays
    together. Only while that is not even enough, the largest pieces are cut in two.
    """
    starts = np.flatnonzero(np.diff(ranked.piece, prepend=-1))
    if num_replicas == 1 or not len(starts):
        return [np.arange(len(ranked.rows)), *[np.zeros(0, np.int64)] * (num_replicas - 1)]
    totals = (float(ranked.compute_s.sum()), float(ranked.memory_s.sum()))
    sums = [
        np.concatenate(([0.0], np.cumsum(column / (total or 1.0) * num_replicas)))
        for column, total in zip((ranked.compute_s, ranked.memory_s), totals, strict=True)
    ]
    largest, best = 0.5, None
    for _ in range(MAX_ROUNDS):
        bounds = np.append(starts, len(ranked.rows))
        compute, memory = (column[bounds[1:]] - column[bounds[:-1]] for column in sums)
        replica, worst = _dealt(compute, memory, num_replicas)
        if best is None or worst < best[0]:
            best = worst, np.repeat(replica, np.diff(bounds))
        largest /= 2.0
        large = np.flatnonzero((np.maximum(compute, memory) > largest) & (np.diff(bounds) > 1))
        if worst <= 1.0 + TOLERANCE or (not len(large) and largest < TOLERANCE):
            break
        cuts = [_cut(ranked.shared_tokens, int(bounds[piece]), int(bounds[piece + 1])) for piece in large.tolist()]
        starts = np.sort(np.concatenate((starts, np.array(cuts, np.int64))))
    assert best is not None
    return [np.flatnonzero(best[1] == number) for number in range(num_replicas)]


def _dealt(compute: FloatArray, memory: FloatArray, num_replicas: int) -> tuple[IntArray, float]:
    """The replica of every piece, and the largest load; times are in shares of a replica."""
    replica = np.zeros(len(compute), np.int64)
    loads = [(0.0, 0.0)] * num_replicas
    times = list(zip(compute.tolist(), memory.tolist(), strict=True))
    for piece in np.argsort(-np.maximum(compute, memory), kind="stable").tolist():
        more_c, more_m = times[piece]
        more = [
            (load_c + more_c) ** POWER - load_c**POWER + (load_m + more_m) ** POWER - load_m**POWER
            for load_c, load_m in loads
        ]
        chosen = more.index(min(more))
        load_c, load_m = loads[chosen]
        loads[chosen] = (load_c + more_c, load_m + more_m)
        replica[piece] = chosen
    return replica, max(map(max, loads))


def _cut(shared_tokens: IntArray, first: int, end: int) -> int:
    """Where a piece of these rows is parted."""
    reach = int(MIDDLE * (end - first) / 2)
    middle = (first + end) // 2
    low = max(middle - reach, first + 1)
    near = shared_tokens[low : max(middle + reach, low) + 1]
    return low + int(near.argmin())
