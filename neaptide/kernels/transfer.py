"""Copies between host and device that do not make the host wait for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, behind the work that it has; ``tensor`` itself where the device is a CPU.

    From memory that the system may move the driver copies in person, and waits for its turn.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Tensors on their way to the host, behind the work that the device has now. Later work does not delay them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """All on one device."""
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
        """The tensors, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
