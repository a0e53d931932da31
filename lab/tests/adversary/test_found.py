"""Loads that the adversary found: each promise holds on them, or its breach is known.

A file that ``neaptide adversary --out`` wrote becomes a test by being put into ``found/``. ``known`` in it says why the
promise is still broken. The test fails once the promise is kept; then empty the field.
"""

from pathlib import Path

import pytest

from neaptide_lab.adversary.found import Found, found_files, read_found

FILES = found_files(Path(__file__).parent / "found")


def marks(found: Found) -> list[pytest.MarkDecorator]:
    return [pytest.mark.xfail(strict=True, reason=found.known, raises=AssertionError)] if found.known else []


@pytest.mark.parametrize(
    "found", [pytest.param(found, id=path.stem, marks=marks(found)) for path in FILES for found in [read_found(path)]]
)
def test_the_promise_holds(found: Found) -> None:
    breach = found.breach()
    assert not breach.is_broken, breach.text
