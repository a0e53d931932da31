"""The file of API keys: read at the start, and again whenever it changes.

[[keys]]
key = "..."
name = "shop"
tier = "priority"
requests_per_minute = 600
tokens_per_minute = 200_000
tokens_per_day = 20_000_000
"""

import asyncio
import logging
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from neaptide.engine.params import Tier
from neaptide.server.http.auth import AcceptedKey, KeyRing, parse_keys, principal_for
from neaptide.server.limits.usage import KeyLimits, LimitName

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_Stamp = tuple[int, int, int] | None


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    name: str = ""
    tier: Tier = Tier.DEFAULT
    admin: bool = False
    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[_Entry]


def read_key_file(path: Path) -> list[AcceptedKey]:
    """The keys of a file.

    Raises:
        ValueError: it cannot be read, or says what makes no sense. One line, without a key.
    """
    try:
        content = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File)
    except OSError as error:
        raise ValueError(f"the key file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        place = re.search(r"line \d+, column \d+", str(error))
        raise ValueError(f"the key file {path} is not TOML{f' ({place[0]})' if place else ''}") from error
    except msgspec.ValidationError as error:
        # A place such as $.keys[2].tier; the values, which may be keys, are left out.
        raise ValueError(f"the key file {path} cannot be used: {_without_values(str(error))}") from error
    if not content.keys:
        raise ValueError(f"the key file {path} has no keys; without any, every request would be accepted")
    return [_accepted(entry, number, path) for number, entry in enumerate(content.keys, 1)]


def _without_values(text: str) -> str:
    return re.sub(r"enum value '.*'", "value", text, flags=re.DOTALL)


def _accepted(entry: _Entry, number: int, path: Path) -> AcceptedKey:
    def refuse(why: str) -> ValueError:
        return ValueError(f"the key file {path} cannot be used: entry {number}: {why}")

    if not entry.key or not entry.key.isascii() or not entry.key.isprintable() or entry.key != entry.key.strip():
        raise refuse("key must be printable ASCII characters")
    if entry.name and not _NAME.fullmatch(entry.name):
        raise refuse("name must be at most 64 letters, digits, dots, dashes and underscores")
    if not 0.0 < entry.weight < 10_000.0:
        raise refuse("weight must be above 0 and below 10,000")
    limits = {name.value: getattr(entry, name.value) for name in LimitName}
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise refuse(f"{name} must be at least 1")
    principal = principal_for(
        entry.key,
        entry.tier,
        is_admin=entry.admin,
        weight=entry.weight,
        name=entry.name,
        limits=KeyLimits(**limits),
    )
    return AcceptedKey(entry.key, principal)


def accepted_keys(entries: Sequence[str], path: str | None) -> list[AcceptedKey]:
    """The keys of ``--api-key`` and of the key file.

    Raises:
        ValueError: one of them cannot be used, or two have the same key or name.
    """
    accepted = parse_keys(entries) + ([] if path is None else read_key_file(Path(path)))
    if path is not None:
        _check_distinct("key", (one.key for one in accepted))
        _check_distinct("name", (one.principal.name for one in accepted if one.principal.name))
    return accepted


def _check_distinct(what: str, values: Iterable[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"two API keys have the same {what}")
        seen.add(value)


class KeyReloader:
    """Keeps a key ring as its file says.

    Args:
        entries: keys of ``--api-key``, which stay.
        on_weights: told of the weights of shares when they have changed. Called on the event loop.
    """

    def __init__(
        self,
        ring: KeyRing,
        entries: Sequence[str],
        path: str,
        on_weights: Callable[[dict[str, float]], None] | None = None,
    ) -> None:
        self._ring = ring
        self._on_weights = on_weights
        self._entries = entries
        self._path = path
        self._seen = self._taken = self._stamp()
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Watches the file from now on."""
        self._watching = asyncio.create_task(self._watch(), name="key file")

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    def reload(self) -> bool:
        """Accepts the keys of the file as it is now. A file that cannot be used changes nothing."""
        self._taken = self._stamp()
        try:
            accepted = accepted_keys(self._entries, self._path)
        except ValueError as error:
            logger.error("%s; the keys of before stay", error)
            return False
        before = {one.tenant: one for one in self._ring.principals}
        weights = self._ring.share_weights
        self._ring.accept(accepted)
        after = {one.tenant: one for one in self._ring.principals}
        logger.info(
            "the key file was read again: %d keys, %d new, %d gone, %d changed",
            len(after),
            len(after.keys() - before.keys()),
            len(before.keys() - after.keys()),
            sum(after[tenant] != before[tenant] for tenant in after.keys() & before.keys()),
        )
        if self._on_weights is not None and self._ring.share_weights != weights:
            self._on_weights(self._ring.share_weights)
        return True

    def has_changed(self) -> bool:
        """Looks at the file. A change counts once two looks find it the same: before, it may be half written."""
        stamp, seen = self._stamp(), self._seen
        self._seen = stamp
        return stamp == seen and stamp != self._taken

    def _stamp(self) -> _Stamp:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if await asyncio.to_thread(self.has_changed):
                self.reload()
