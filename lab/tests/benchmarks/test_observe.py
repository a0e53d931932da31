"""Stages of the check of ``neaptide observe``: made once, and what an error said is kept."""

from pathlib import Path

import pytest

from lab.benchmarks.observe import kept


def test_a_stage_that_has_figures_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "alone-1.json"
    assert kept(path, lambda log: {"chats": 3}) == {"chats": 3}
    assert kept(path, lambda log: {"chats": 4}) == {"chats": 3}


def test_what_a_stage_and_its_error_said_is_kept_and_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(log: Path) -> None:
        log.write_text("the server said no", encoding="utf-8")
        raise SystemExit("it ended with 3")

    path = tmp_path / "inside-1.json"
    with pytest.raises(SystemExit):
        kept(path, fail)
    assert "it ended with 3" in path.with_suffix(".error").read_text(encoding="utf-8")
    said = capsys.readouterr().err
    assert "the server said no" in said
    assert "it ended with 3" in said
    assert kept(path, lambda log: 5) == 5
    assert not path.with_suffix(".error").exists()
