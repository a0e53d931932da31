"""One sentence that says what a batch, or a line of it, waited for."""

from collections.abc import Callable
from typing import NamedTuple

from neaptide.durations import duration
from neaptide.server.why.device_time import OTHER_KEYS, DeviceUse, UsedTime
from neaptide.server.why.sentences import LEAST_SHARE

_WORDS = {
    DeviceUse.CHATS: "chats",
    DeviceUse.MEMORY: "chats whose memory left none for batch work",
    DeviceUse.PAUSED: "batch work was paused",
    DeviceUse.ENGINE_GONE: "no engine",
    DeviceUse.BETWEEN: "the engine between its steps or without work",
    DeviceUse.NOT_RECORDED: "not recorded, before the server's start",
}


class BatchWait(NamedTuple):
    """The wait of a batch or a line, in parts."""

    is_line: bool
    is_over: bool
    """Whether the line has been scheduled, or the batch has ended."""
    parts_s: dict[str, float]
    """Seconds by words; they add up to the wait."""

    @property
    def total_s(self) -> float:
        return sum(self.parts_s.values())

    @property
    def sentence(self) -> str:
        verb = "waited" if self.is_line else "took"
        so_far = "" if self.is_over else " so far"
        largest_first = sorted(self.parts_s.items(), key=lambda item: -item[1])
        told = [f"{what} {duration(s)}" for what, s in largest_first if s > 0 and s >= LEAST_SHARE * self.total_s]
        return f"{verb} {duration(self.total_s)}{so_far}{': ' if told else ''}{', '.join(told)}"


def batch_wait(
    used: UsedTime,
    own_share: str,
    checking_s: float,
    name_of: Callable[[str], str],
    *,
    is_line: bool = False,
    is_over: bool = True,
) -> BatchWait:
    """Parts of a batch's time.

    Args:
        used: the device's time since its lines were checked.
        checking_s: time until then.
        name_of: words for the key of another share.
    """
    parts_s = {"checking its lines": checking_s}
    parts_s |= {_WORDS[use]: seconds for use, seconds in used.uses.items()}
    for share, seconds in used.keys.items():
        if share == own_share:
            what = "earlier work of its own key" if is_line else "work of its own key"
        else:
            what = "turns of other keys" if share == OTHER_KEYS else name_of(share)
        parts_s[what] = parts_s.get(what, 0.0) + seconds
    return BatchWait(is_line, is_over, parts_s)
