"""Plans whose tensors keep their addresses, for CUDA graphs that are recorded once and replayed for many steps."""

import torch
from torch import Tensor

from neaptide.kernels.kv_write.reference import WritePlaces, slots_of
from neaptide.kernels.prefix_attention.attention import PrefixAttention, PrefixPlan, parts_of

TABLE_ENTRIES = 1 << 18
"""Entries of all requests' block tables: 256 requests of 16 thousand tokens, in blocks of 16."""
_ITEMS_EACH, _MOST_ITEMS, _MORE_ITEMS = 2, 768, 96
"""Attention items: per token, their maximum, and extra ones.

The extra items match the number of programs that splitting a few long contexts aims at. Empty items take time too.
"""
_ROWS_EACH, _MORE_ROWS = 4, 256


class FixedRoom:
    """Device memory shared by the plans of all sizes. One step is computed at a time.

    Args:
        kernel: the planner.
        most_tokens: size of the largest plan.
    """

    def __init__(self, kernel: PrefixAttention, most_tokens: int) -> None:
        def integers(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=kernel.device)

        num_rows = _ROWS_EACH * most_tokens + _MORE_ROWS
        self.items = integers(_room_for_items(most_tokens), 5)
        self.table = integers(TABLE_ENTRIES + 1)
        self.row_tokens, self.row_limits, self.row_parts = (integers(num_rows) for _ in range(3))
        self.merges = integers(most_tokens, 3)
        self.token_tables, self.token_limits = integers(most_tokens), integers(most_tokens)
        self.parts, self.part_scales = parts_of(kernel, num_rows)


class FixedPlan(PrefixPlan):
    """A plan of ``num_tokens`` tokens that the plans of smaller steps are loaded into.

    The remaining tokens compute unused results and write to the spare block.

    Args:
        kernel: the planner.
        room: memory of the plan.
        num_tokens: size of the plan.
        spare_block: used by nothing else.
    """

    def __init__(self, kernel: PrefixAttention, room: FixedRoom, num_tokens: int, spare_block: int) -> None:
        self.kernel, self.num_tokens = kernel, num_tokens
        self._blocks = (spare_block, spare_block)
        self.items = room.items[: _room_for_items(num_tokens)]
        self.table = room.table
        self.row_tokens, self.row_limits, self.row_parts = room.row_tokens, room.row_limits, room.row_parts
        self.merges = room.merges[:num_tokens]
        self.token_tables, self._token_limits = room.token_tables[:num_tokens], room.token_limits[:num_tokens]
        self.parts, self._part_scales = room.parts, room.part_scales
        self.table[-1] = 2 * spare_block
        self._spare(0)

    @property
    def places(self) -> WritePlaces:
        return WritePlaces(self.table, self.token_tables, self._token_limits)

    @property
    def slots(self) -> Tensor:
        """Recomputed for every layer, and so in every replay."""
        return slots_of(self.places, self.kernel.block_size)

    def takes(self, plan: PrefixPlan) -> bool:
        """Whether a step's plan fits into this one."""
        return (
            plan.num_tokens <= self.num_tokens
            and len(plan.items) <= len(self.items)
            and plan.table.numel() < len(self.table)
            and len(plan.row_tokens) <= len(self.row_tokens)
            and len(plan.merges) <= len(self.merges)
            and len(plan.parts) <= len(self.parts)
        )

    def load(self, plan: PrefixPlan) -> None:
        """Loads a step's plan, which must fit. The copies are queued after the device's current work."""
        count = plan.num_tokens
        self._spare(count)
        self.items[: len(plan.items)].copy_(plan.items)
        self.table[: plan.table.numel()].copy_(plan.table)
        for ours, theirs in (
            (self.row_tokens, plan.row_tokens),
            (self.row_limits, plan.row_limits),
            (self.row_parts, plan.row_parts),
        ):
            ours[: len(theirs)].copy_(theirs)
        self.merges[: len(plan.merges)].copy_(plan.merges)
        self.token_tables[:count].copy_(plan.token_tables)
        self._token_limits[:count].copy_(plan.row_limits[:count])

    def _spare(self, first: int) -> None:
        """Clears items and merges, and points the tokens from ``first`` on at the spare block."""
        self.items.zero_()
        self.merges.zero_()
        self.token_tables[first:].fill_(TABLE_ENTRIES)
        self._token_limits[first:].fill_(1)


def _room_for_items(num_tokens: int) -> int:
    return min(_ITEMS_EACH * num_tokens, _MOST_ITEMS) + _MORE_ITEMS
