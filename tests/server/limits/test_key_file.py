"""The file of keys: what it may say, and how a changed one is taken."""

import logging
import os
import threading
from pathlib import Path

import pytest

from neaptide.engine.params import Tier
from neaptide.server.http.auth import KeyRing
from neaptide.server.http.errors import AuthenticationError
from neaptide.server.limits.key_file import KeyReloader, accepted_keys, read_key_file
from neaptide.server.limits.usage import KeyLimits
from tests.patience import until

FULL = """
[[keys]]
key = "secret-one"
name = "shop"
tier = "priority"
admin = true
weight = 2
requests_per_minute = 600
tokens_per_minute = 200_000
tokens_per_day = 20_000_000

[[keys]]
key = "secret-two"
"""
ONE, TWO = ('[[keys]]\nkey = "secret-one"\n', '[[keys]]\nkey = "secret-two"\n')


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def write(file: Path, text: str) -> None:
    """As another program does that replaces files whole."""
    new = file.with_suffix(".new")
    new.write_text(text)
    os.replace(new, file)


def test_a_file_gives_keys_names_rights_and_limits(file: Path) -> None:
    file.write_text(FULL)
    one, two = (accepted.principal for accepted in read_key_file(file))
    assert (one.name, one.tier, one.ceiling, one.is_admin, one.weight) == (
        "shop",
        Tier.PRIORITY,
        Tier.PRIORITY,
        True,
        2.0,
    )
    assert one.limits == KeyLimits(600, 200_000, 20_000_000)
    assert (two.label, two.tier, two.is_limited) == (two.key_id, Tier.DEFAULT, False)


def test_a_key_has_the_tenant_that_it_has_as_a_flag(file: Path) -> None:
    file.write_text(ONE)
    assert read_key_file(file)[0].principal == KeyRing(("secret-one",)).principals[0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Object missing required field `keys`"),
        ("keys = []", "has no keys; without any, every request would be accepted"),
        ('[[keys]]\nkey "secret"', "is not TOML (line 2, column 5)"),
        ("[[keys]]\nkey = 5", "Expected `str`, got `int` - at `$.keys[0].key`"),
        ("[[keys]]\nname = 'a'", "Object missing required field `key` - at `$.keys[0]`"),
        (ONE + "tier = 'secret'", "Invalid value - at `$.keys[0].tier`"),
        (ONE + "requests_per_hour = 5", "Object contains unknown field `requests_per_hour` - at `$.keys[0]`"),
        (ONE + "requests_per_minute = 0", "entry 1: requests_per_minute must be at least 1"),
        (ONE + "weight = 0", "entry 1: weight must be above 0 and below 10,000"),
        (ONE + "weight = nan", "entry 1: weight must be above 0 and below 10,000"),
        (ONE + "name = 'a b'", "entry 1: name must be at most 64 letters, digits, dots, dashes and underscores"),
        ('[[keys]]\nkey = "secret\\u00e9"', "entry 1: key must be printable ASCII characters"),
        ('[[keys]]\nkey = " "', "entry 1: key must be printable ASCII characters"),
        (ONE + ONE, "two API keys have the same key"),
        (ONE + "name = 'a'\n" + TWO + "name = 'a'", "two API keys have the same name"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_in_one_line_without_its_keys(file: Path, text: str, reason: str) -> None:
    file.write_text(text)
    with pytest.raises(ValueError, match=r"key") as caught:
        accepted_keys((), str(file))
    said = str(caught.value)
    assert said.endswith(reason)
    assert ("\n" in said, "secret" in said) == (False, False)


def test_a_key_of_the_flag_and_the_file_is_refused(file: Path) -> None:
    file.write_text(ONE)
    with pytest.raises(ValueError, match="the same key"):
        accepted_keys(("secret-one:batch",), str(file))


def test_a_missing_file_is_refused(file: Path) -> None:
    with pytest.raises(ValueError, match=r"keys\.toml cannot be read: No such file or directory$"):
        read_key_file(file)


class Watched:
    """A ring, and what follows its file."""

    def __init__(self, file: Path, *entries: str) -> None:
        self.ring = KeyRing()
        self.ring.accept(accepted_keys(entries, str(file)))
        self.weights: list[dict[str, float]] = []
        self.reloader = KeyReloader(self.ring, entries, str(file), self.weights.append)

    def look(self) -> None:
        if self.reloader.has_changed():
            self.reloader.reload()

    def accepts(self, key: str) -> bool:
        try:
            self.ring.identify(f"Bearer {key}")
        except AuthenticationError:
            return False
        return True

    @property
    def accepted(self) -> list[str]:
        return [key for key in ("secret-one", "secret-two", "flag") if self.accepts(key)]


def test_a_changed_file_is_taken_once_it_is_still(file: Path) -> None:
    write(file, ONE)
    watched = Watched(file, "flag")
    watched.look()
    assert watched.accepted == ["secret-one", "flag"]
    write(file, TWO)
    watched.look()
    assert watched.accepted == ["secret-one", "flag"]  # it may be half written
    watched.look()
    assert watched.accepted == ["secret-two", "flag"]


def test_a_file_behind_links_is_followed_as_a_kubelet_swaps_them(tmp_path: Path) -> None:
    """keys.toml -> ..data/keys.toml, and ..data is replaced by a link to a new directory."""
    for name, text in (("first", ONE), ("second", TWO)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys.toml").write_text(text)
    (tmp_path / "..data").symlink_to("first")
    (tmp_path / "keys.toml").symlink_to("..data/keys.toml")
    watched = Watched(tmp_path / "keys.toml")
    assert watched.accepted == ["secret-one"]
    (tmp_path / "..new").symlink_to("second")
    os.replace(tmp_path / "..new", tmp_path / "..data")
    watched.look()
    watched.look()
    assert watched.accepted == ["secret-two"]


@pytest.mark.parametrize("broken", ["", "keys = [", "keys = []", None])
def test_a_broken_file_leaves_the_keys_and_says_so_once(
    file: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    write(file, ONE)
    watched = Watched(file)
    if broken is None:
        file.unlink()
    else:
        write(file, broken)
    for _ in range(4):
        watched.look()
    assert watched.accepted == ["secret-one"]
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert [error.endswith("; the keys of before stay") for error in errors] == [True]
    write(file, TWO)
    for _ in range(2):
        watched.look()
    assert watched.accepted == ["secret-two"]


def test_the_log_says_what_has_changed(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(file, ONE)
    watched = Watched(file)
    write(file, f"{ONE}weight = 3\n{TWO}")
    with caplog.at_level(logging.INFO):
        assert watched.reloader.reload()
    assert [record.getMessage() for record in caplog.records] == [
        "the key file was read again: 2 keys, 1 new, 0 gone, 1 changed"
    ]


def test_all_that_a_file_says_of_a_key_changes_with_it(file: Path) -> None:
    write(file, ONE)
    watched = Watched(file)
    share = watched.ring.identify("Bearer secret-one").share
    write(file, FULL)
    assert watched.reloader.reload()
    assert watched.ring.identify("Bearer secret-one") == read_key_file(file)[0].principal
    assert watched.weights == [{share: 2.0}]
    assert (watched.ring.share_weight(share), watched.ring.share_weight("another")) == (2.0, 1.0)
    write(file, FULL.replace("600", "601"))
    assert watched.reloader.reload()
    assert len(watched.weights) == 1  # they are the same
    write(file, TWO)
    assert watched.reloader.reload()
    assert watched.weights[1:] == [{}]
    assert watched.ring.share_weight(share) == 1.0


async def test_a_watched_file_is_read_again_on_the_event_loop(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's socket belongs to the loop's thread."""
    write(file, ONE)
    watched = Watched(file)
    threads: list[int] = []
    watched.reloader._on_weights = lambda _: threads.append(threading.get_ident())
    monkeypatch.setattr("neaptide.server.limits.key_file.LOOK_EVERY_S", 0.0)
    write(file, ONE + "weight = 3")
    watched.reloader.start()
    await until(lambda: bool(threads))
    await watched.reloader.stop()
    assert threads == [threading.get_ident()]
