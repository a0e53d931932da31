"""A pool parted for several replicas: equal compute, equal memory time, so equal density; little sharing lost."""

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.engine.offline.planning.blend import Ranked

TOLERANCE = 0.005
"""No replica's compute or memory time is further above its share, unless nothing can be cut any more."""
SPARING_TOLERANCE = 0.01
"""So even are parts with few cuts to be, or more are made."""
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
    together. Only while that is not even enough, pieces are cut in two: of each replica that has too much the smallest
    one that is more than what it has too much. Where that does not make the parts even, all of the largest are.
    """
    starts = np.flatnonzero(np.diff(ranked.piece, prepend=-1))
    if num_replicas == 1 or not len(starts):
        return [np.arange(len(ranked.rows)), *[np.zeros(0, np.int64)] * (num_replicas - 1)]
    totals = (float(ranked.compute_s.sum()), float(ranked.memory_s.sum()))
    sums = [
        np.concatenate(([0.0], np.cumsum(column / (total or 1.0) * num_replicas)))
        for column, total in zip((ranked.compute_s, ranked.memory_s), totals, strict=True)
    ]
    worst, parts = _parted(ranked.shared_tokens, sums, starts, num_replicas, is_sparing=True)
    if worst > 1.0 + SPARING_TOLERANCE:
        worst, parts = min(
            (worst, parts),
            _parted(ranked.shared_tokens, sums, starts, num_replicas, is_sparing=False),
            key=lambda x: x[0],
        )
    return [np.flatnonzero(parts == number) for number in range(num_replicas)]


def _parted(
    shared_tokens: IntArray, sums: list[FloatArray], starts: IntArray, num_replicas: int, is_sparing: bool
) -> tuple[float, IntArray]:
    """The largest load, and the replica of every row.

    Args:
        sums: both times of all rows before each, in shares of a replica.
        starts: of pieces.
        is_sparing: cut of each replica that has too much one piece, not all that are large.
    """
    largest, best = 0.5, (np.inf, np.zeros(len(shared_tokens), np.int64))
    for _ in range(MAX_ROUNDS):
        bounds = np.append(starts, len(shared_tokens))
        times, num_rows = np.stack([column[bounds[1:]] - column[bounds[:-1]] for column in sums]), np.diff(bounds)
        replica, loads = _dealt(times, num_replicas)
        worst = float(loads.max())
        if worst < best[0]:
            best = worst, np.repeat(replica, num_rows)
        largest /= 2.0
        if is_sparing:
            pieces = _too_large(times, replica, loads, num_rows)
            is_over = not pieces
        else:
            pieces = np.flatnonzero((times.max(axis=0) > largest) & (num_rows > 1)).tolist()
            is_over = not pieces and largest < TOLERANCE
        if worst <= 1.0 + TOLERANCE or is_over:
            break
        cuts = [_cut(shared_tokens, int(bounds[piece]), int(bounds[piece + 1])) for piece in pieces]
        starts = np.sort(np.concatenate((starts, np.array(cuts, np.int64))))
    return best


def _dealt(times: FloatArray, num_replicas: int) -> tuple[IntArray, FloatArray]:
    """The replica of every piece, and the loads [compute or memory, replicas]; times are in shares of a replica."""
    replica = np.zeros(times.shape[1], np.int64)
    loads = [(0.0, 0.0)] * num_replicas
    of_piece = list(zip(*times.tolist(), strict=True))
    for piece in np.argsort(-times.max(axis=0), kind="stable").tolist():
        more_c, more_m = of_piece[piece]
        more = [
            (load_c + more_c) ** POWER - load_c**POWER + (load_m + more_m) ** POWER - load_m**POWER
            for load_c, load_m in loads
        ]
        chosen = more.index(min(more))
        load_c, load_m = loads[chosen]
        loads[chosen] = (load_c + more_c, load_m + more_m)
        replica[piece] = chosen
    return replica, np.array(loads).T


def _too_large(times: FloatArray, replica: IntArray, loads: FloatArray, num_rows: IntArray) -> list[int]:
    """Pieces to be cut: of each replica above its share, in the time in which it is, the smallest one that takes at
    least as long as that is above, else the largest. None has a single row."""
    kind = loads.argmax(axis=0)
    pieces: list[int] = []
    for number in np.flatnonzero(loads.max(axis=0) > 1.0 + TOLERANCE).tolist():
        own = np.flatnonzero((replica == number) & (num_rows > 1))
        if len(own):
            taken = times[kind[number], own]
            surplus = loads[kind[number], number] - 1.0
            large = own[taken >= surplus]
            pieces.append(int(large[taken[taken >= surplus].argmin()] if len(large) else own[taken.argmax()]))
    return pieces


def _cut(shared_tokens: IntArray, first: int, end: int) -> int:
    """Where a piece of these rows is parted."""
    reach = int(MIDDLE * (end - first) / 2)
    middle = (first + end) // 2
    low = max(middle - reach, first + 1)
    near = shared_tokens[low : max(middle + reach, low) + 1]
    return low + int(near.argmin())
