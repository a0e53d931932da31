"""Plans by hand."""

from collections.abc import Sequence

from neaptide.engine.messages import DualScanPlan, PlanReady
from neaptide.engine.offline.planned import raw


def plan(*rows: tuple[str, int], ends: DualScanPlan | None = None) -> PlanReady:
    """These rows of batches, in this order."""
    batch_ids = list(dict.fromkeys(batch_id for batch_id, _ in rows))
    batches = [batch_ids.index(batch_id) for batch_id, _ in rows]
    return PlanReady(batch_ids, raw(batches), raw([row for _, row in rows]), ends)


def two_ends(
    held_tokens: Sequence[int],
    densities: Sequence[float],
    root_density: float,
    turns: Sequence[int] | None = None,
    lasting_steps: Sequence[int] | None = None,
    starts: Sequence[int] = (),
    kv_tokens: int = 0,
) -> DualScanPlan:
    """Of few rows, of which each is a window.

    Args:
        turns: None takes them from the left end.
        lasting_steps: None goes for answers as long as what they hold.
        starts, kv_tokens: of a timetable.
    """
    turns = range(len(held_tokens)) if turns is None else turns
    lasting_steps = held_tokens if lasting_steps is None else lasting_steps
    return DualScanPlan(
        raw(held_tokens),
        raw(lasting_steps),
        list(densities),
        [1.0] * len(densities),
        root_density,
        1e-3,
        1e-6,
        raw(turns),
        raw(starts),
        kv_tokens,
    )
