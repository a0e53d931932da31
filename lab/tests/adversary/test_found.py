"""Loads that the adversary found: each promise holds on them, or its breach is known.

A file that ``neaptide adversary --out`` wrote becomes a test by being put here. ``known`` in it says why the promise is
still broken; the test fails once it is kept, and ``known`` is then to be emptied.
"""

from pathlib import Path

import pytest

from neaptide_lab.adversary.found import found_files, read_found

FOLDER = Path(__file__).parent / "found"
FILES = found_files(FOLDER)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_promise_holds(path: Path, request: pytest.FixtureRequest) -> None:
    found = read_found(path)
    if found.known:
        request.applymarker(pytest.mark.xfail(strict=True, reason=found.known, raises=AssertionError))
    breach = found.breach()
    assert not breach.is_broken, breach.text
