"""Compiling C sources: once, into a cache, and what is said where that is not possible."""

import logging
import shutil
from pathlib import Path

import pytest
import torch

from neaptide.kernels import native
from neaptide.kernels.native import COMPILERS, CompileError, load_library
from neaptide.kernels.paged_attention import StepTables, attention_planner
from neaptide.kernels.paged_attention.native import NativePlan

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C compiler")
SOURCE = "int answer(void) { return 42; }\n"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_library.cache_clear()
    return tmp_path / "cache" / "neaptide" / "native"


def write(directory: Path, text: str = SOURCE) -> Path:
    path = directory / "sums.c"
    path.write_text(text)
    return path


@needs_compiler
def test_a_source_is_compiled_once(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_library(write(tmp_path)).answer() == 42
    assert len(list(own_cache.glob("sums-*.so"))) == 1
    load_library.cache_clear()  # as another process would begin
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    assert load_library(tmp_path / "sums.c").answer() == 42


@needs_compiler
def test_another_source_is_another_library(tmp_path: Path, own_cache: Path) -> None:
    load_library(write(tmp_path))
    load_library.cache_clear()
    assert load_library(write(tmp_path, SOURCE.replace("42", "43"))).answer() == 43
    assert len(list(own_cache.glob("sums-*.so"))) == 2


@needs_compiler
def test_a_source_that_does_not_compile(tmp_path: Path, own_cache: Path) -> None:
    with pytest.raises(CompileError, match=r"fails: .*sums\.c"):
        load_library(write(tmp_path, "nonsense"))
    assert not list(own_cache.glob("*.so"))
    assert not [path for path in own_cache.iterdir() if path.is_dir()]


@needs_compiler
def test_a_compiler_that_does_not_know_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_TUNED", ("-march=no-such-machine",))
    assert load_library(write(tmp_path)).answer() == 42


@needs_compiler
def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(native.tempfile, "tempdir", str(tmp_path))
    assert load_library(write(tmp_path)).answer() == 42


def planner(kernels: str) -> object:
    return attention_planner(4, 2, 8, 16, dtype=torch.float32, device=torch.device("cpu"), kernels=kernels)


def test_torch_attends_where_there_is_no_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "COMPILERS", ("no-such-compiler",))
    with caplog.at_level(logging.WARNING):
        found = planner("auto")
    assert not isinstance(getattr(found, "__self__", None), native.ctypes.CDLL)
    assert caplog.messages == ["attention runs on torch, which is slower: there is no C compiler (no-such-compiler)"]


def test_native_that_is_insisted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(ValueError, match="there is no C compiler"):
        planner("native")


@needs_compiler
def test_torch_that_is_asked_for(own_cache: Path) -> None:
    planner("torch")
    assert not own_cache.exists()


@needs_compiler
def test_native_is_the_default_on_a_cpu() -> None:
    import numpy as np

    plan = planner("auto")(np.array([1]), np.array([5]), StepTables.of(np.array([[0]])))  # type: ignore[operator]
    assert isinstance(plan, NativePlan)
