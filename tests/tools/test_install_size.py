"""``tools.install_size``: what it asks of pip, and what it reads on the page. pip itself is not run."""

from pathlib import Path

import pytest

from tools.install_size import SENTENCE, TORCH, requirements, rounded, size_of, stated

SIZES = {"base": "41 MB", "server": "63 MB", "cpu": "270 MB", "cuda": "3.1 GB"}


def test_an_extra_is_what_it_and_those_inside_it_need() -> None:
    names = {requirement.partition(">")[0] for requirement in requirements("torch")}
    assert {"torch", "safetensors", "fastapi", "SQLAlchemy"} <= names
    assert not any(name.startswith("neaptide") for name in names)


def test_the_base_is_light() -> None:
    names = {requirement.partition(">")[0] for requirement in requirements()}
    assert names.isdisjoint({"torch", "fastapi", "SQLAlchemy", "alembic", "psycopg[binary]", "llguidance"})


def test_torchs_version_is_that_of_the_makefile() -> None:
    assert TORCH is not None


@pytest.mark.parametrize(("size", "text"), [(41_234_567, "41 MB"), (104_000_000, "100 MB"), (3_140_000_000, "3.1 GB")])
def test_sizes_have_two_digits(size: int, text: str) -> None:
    assert rounded(size) == text


def test_a_file_on_this_machine_is_as_large_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a+cpu.whl").write_bytes(b"12345")
    assert size_of(f"file://{tmp_path}/a%2Bcpu.whl") == 5


def test_other_schemes_are_not_opened() -> None:
    with pytest.raises(ValueError, match="neither a file nor https"):
        size_of("ftp://host/a.whl")


def test_the_sentence_is_found_on_a_page_whatever_its_lines() -> None:
    page = f"# Title\n\n{SENTENCE.format(**SIZES)}\n".replace(" downloads ", "\ndownloads ")
    assert stated(page) == [41_000_000, 63_000_000, 270_000_000, 3_100_000_000]
    with pytest.raises(ValueError, match="does not say"):
        stated("# Title\n")
