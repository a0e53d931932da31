"""Input tokens that are not known when a step is submitted, because the step before still samples them.

They never need the host: the sampled tokens lie on the device, and are copied from there into the next step's input.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from neaptide.kernels.transfer import HostCopy, to_device


class SampledRow(NamedTuple):
    """Where a request's sampled token is."""

    token_ids: Tensor
    """[rows] int64 on the device: of all requests that sampled in that step."""
    on_host: HostCopy
    """Its first tensor holds the same."""
    row: int

    def wait(self) -> int:
        """The token, once its step is done."""
        return int(self.on_host.wait()[0][self.row])


class RecentTokens:
    """The last two tokens that a request sampled, by their index in its output.

    Two, because a step that raised may be submitted again in parts after it has sampled for some: the token that it
    reads is then the last but one.
    """

    __slots__ = ("_last", "_last_position", "_previous")

    def __init__(self) -> None:
        self._last: SampledRow | None = None
        self._last_position = -1
        self._previous: SampledRow | None = None

    def keep(self, output_position: int, sampled: SampledRow) -> None:
        if output_position != self._last_position:
            self._previous = self._last if output_position == self._last_position + 1 else None
        self._last, self._last_position = sampled, output_position

    def at(self, output_position: int) -> SampledRow | None:
        if output_position == self._last_position:
            return self._last
        return self._previous if output_position == self._last_position - 1 else None


def fill_(token_ids: Tensor, rows: list[int], sources: list[SampledRow]) -> None:
    """Writes the token of ``sources[i]`` to ``token_ids[rows[i]]``, on the device."""
    by_step: dict[int, tuple[Tensor, list[int], list[int]]] = {}
    for row, source in zip(rows, sources, strict=True):
        _, into, out_of = by_step.setdefault(id(source.token_ids), (source.token_ids, [], []))
        into.append(row)
        out_of.append(source.row)
    for sampled, into, out_of in by_step.values():
        indices = to_device(torch.tensor([into, out_of]), token_ids.device)
        token_ids.index_copy_(0, indices[0], sampled.index_select(0, indices[1]))
