"""Copies between host and device that do not make the host wait."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, queued after the device's current work; ``tensor`` itself if the device is a CPU.

    The driver copies pageable memory synchronously, so the source is pinned first.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Copies tensors to the host, after the device's current work. Later work does not delay the copy."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """All tensors must be on one device."""
        self._tensors = list(tensors)
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].device.type == "cuda":
            self._tensors = [
                torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The copied tensors, once they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
