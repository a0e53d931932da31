"""Input tokens that are unknown when a step is submitted, because the previous step still samples them.

The host never needs them: sampled tokens are on the device and are copied from there into the next step's input.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from neaptide.kernels.transfer import HostCopy, to_device


class SampledRow(NamedTuple):
    """The place of a request's sampled token."""

    token_ids: Tensor
    """[rows] int64 on the device, tokens of all requests that sampled in that step."""
    on_host: HostCopy
    """The copy to the host; its first tensor holds the same tokens."""
    row: int

    def wait(self) -> int:
        """The token, once its step is done."""
        return int(self.on_host.wait()[0][self.row])


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
