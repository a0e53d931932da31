"""Sums of what a batch has cost, and of what its time went to. Each start of the server has its own."""

from collections.abc import Iterable

import msgspec

from neaptide.engine.messages import DeviceCharge

COUNTED = (
    "device_s",
    "computed_s",
    "prefill_tokens",
    "computed_tokens",
    "decode_tokens",
    "recomputed_tokens",
    "cached_tokens",
    "num_preemptions",
)
"""Fields of ``DeviceCharge`` that are added up."""


class BatchSums(msgspec.Struct):
    """Sums of one batch; fields as in ``DeviceCharge``."""

    device_s: float = 0.0
    computed_s: float = 0.0
    prefill_tokens: float = 0.0
    computed_tokens: int = 0
    decode_tokens: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0
    time_s: dict[str, float] = {}
    """Seconds since its lines were checked, by what they went to (``sentences.TIME_WORDS``)."""

    def charge(self, one: DeviceCharge) -> None:
        for name in COUNTED:
            setattr(self, name, getattr(self, name) + getattr(one, name))

    def spend(self, parts_s: dict[str, float]) -> None:
        """Adds seconds by what they went to."""
        for name, seconds in parts_s.items():
            self.time_s[name] = self.time_s.get(name, 0.0) + seconds


sums_encoder = msgspec.json.Encoder()
sums_decoder = msgspec.json.Decoder(BatchSums)


def total(parts: Iterable[BatchSums]) -> BatchSums:
    """The sums of several starts of the server."""
    whole = BatchSums()
    for part in parts:
        for name in COUNTED:
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        whole.spend(part.time_s)
    return whole
