"""Compiling C sources: once, into a cache, and what is said where that is not possible."""

import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from neaptide.kernels import native
from neaptide.kernels.choice import Kernels, choose_kernels
from neaptide.kernels.layer_ops import NativeLayerOps, TorchLayerOps
from neaptide.kernels.linear.native import SOURCE as LINEAR
from neaptide.kernels.native import COMPILERS, CompileError, load_library
from neaptide.kernels.paged_attention import Shape, StepTables
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
def test_a_library_of_the_installation_needs_no_cache(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "PREBUILT", tmp_path / "compiled")
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    (tmp_path / "sums").mkdir()
    source = write(tmp_path / "sums")
    native.compile_all()
    assert load_library(source).answer() == 42
    assert not own_cache.exists()
    # A processor of another kind compiles its own, and says so.
    load_library.cache_clear()
    monkeypatch.setattr(native, "_machine", lambda: ("another",))
    caplog.set_level(logging.INFO)
    assert load_library(source).answer() == 42
    assert "compiling sums.c, once" in caplog.text
    assert len(list(own_cache.glob("sums-*.so"))) == 1


@needs_compiler
def test_another_source_is_another_library(tmp_path: Path, own_cache: Path) -> None:
    load_library(write(tmp_path))
    load_library.cache_clear()
    assert load_library(write(tmp_path, SOURCE.replace("42", "43"))).answer() == 43
    assert len(list(own_cache.glob("sums-*.so"))) == 2


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="another compiler")
@pytest.mark.parametrize(
    ("processor", "instructions"),
    [("cooperlake", {"vdpbf16ps"}), ("sapphirerapids", {"vdpbf16ps", "tdpbf16ps"})],
)
def test_products_compile_for_processors_that_are_not_at_hand(
    tmp_path: Path, processor: str, instructions: set[str]
) -> None:
    """Without a warning, and to what these processors have for bf16."""
    compiler, to = native.find_compiler(), tmp_path / "linear.s"
    assert compiler is not None
    flags = [f"-march={processor}", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-S", "-o", str(to)]
    done = subprocess.run([compiler, *flags, str(LINEAR)], capture_output=True, text=True)
    if "-march" in done.stderr:
        pytest.skip(f"{compiler} does not know {processor}")
    assert done.returncode == 0, done.stderr
    assert instructions == set(re.findall(r"\b[vt]dpbf16ps\b", to.read_text()))


@needs_compiler
def test_a_source_that_does_not_compile(tmp_path: Path, own_cache: Path) -> None:
    with pytest.raises(CompileError, match=r"fails: .*sums\.c"):
        load_library(write(tmp_path, "nonsense"))
    assert not list(own_cache.glob("*.so"))
    assert not [path for path in own_cache.iterdir() if path.is_dir()]


@needs_compiler
@pytest.mark.parametrize(("name", "flag"), [("_TUNED", "-march=no-such-machine"), ("_FUSED", "--no-such-flag")])
def test_a_compiler_that_does_not_know_a_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, flag: str
) -> None:
    monkeypatch.setattr(native, name, (flag,))
    assert load_library(write(tmp_path)).answer() == 42


@needs_compiler
def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(native.tempfile, "tempdir", str(tmp_path))
    assert load_library(write(tmp_path)).answer() == 42
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "sums.c"], "nothing is left"
    assert "compiling sums.c at every start" in caplog.text


@needs_compiler
@pytest.mark.parametrize("home", ["no file", "", "relative"])
def test_nobodys_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    """A user that the system does not know, without HOME: in a container, say."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(native.Path, "home", unknown)
    monkeypatch.setattr(native.tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    if home == "no file":
        monkeypatch.delenv("XDG_CACHE_HOME")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert load_library(write(tmp_path)).answer() == 42
    assert [path.name for path in tmp_path.iterdir()] == ["sums.c"]


@needs_compiler
@pytest.mark.parametrize("damage", ["empty", "half", "zeros at the end"])
def test_a_library_that_was_damaged_is_compiled_again(tmp_path: Path, own_cache: Path, damage: str) -> None:
    """As after a power cut; in a process of its own, for some of these would end ours."""
    assert answer_elsewhere(write(tmp_path)) == "42"
    (path,) = own_cache.glob("sums-*.so")
    whole = path.read_bytes()
    damaged = {
        "empty": b"",
        "half": whole[: len(whole) // 2],
        "zeros at the end": whole[:4096] + bytes(len(whole) - 4096),
    }
    path.write_bytes(damaged[damage])
    assert answer_elsewhere(tmp_path / "sums.c") == "42"
    assert path.read_bytes() == whole


@needs_compiler
def test_of_processes_that_start_together_one_compiles(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, log = native.find_compiler(), tmp_path / "compiled"
    (tmp_path / "bin").mkdir()
    slow = tmp_path / "bin" / "cc"
    slow.write_text(
        f'#!/bin/sh\ncase "$1" in --version) ;; *) echo once >> {log}; sleep 0.5;; esac\nexec {compiler} "$@"\n'
    )
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(slow.parent), prepend=os.pathsep)
    source = write(tmp_path)
    processes = [start_elsewhere(source) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in processes] == ["42", "42"]
    assert log.read_text().split() == ["once"]


def start_elsewhere(source: Path) -> "subprocess.Popen[str]":
    code = f"import neaptide.kernels.native as n; print(n.load_library(n.Path({str(source)!r})).answer())"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def answer_elsewhere(source: Path) -> str:
    """What a process of its own finds; nothing if that ends it."""
    return start_elsewhere(source).communicate()[0].strip()


def chosen(kernels: str) -> Kernels:
    return choose_kernels(Shape(4, 2, 8, 16), dtype=torch.float32, device=torch.device("cpu"), cpu_kernels=kernels)


def test_one_read_of_a_shared_prefix_serves_the_decodes_of_a_tile() -> None:
    """A tile has 48 query rows; each decode has two per KV head. Torch and batch-invariant kernels share no reads."""
    assert chosen("native").decodes_per_read == 24
    assert chosen("torch").decodes_per_read == 1
    shape, cpu = Shape(4, 2, 8, 16), torch.device("cpu")
    assert choose_kernels(shape, dtype=torch.float32, device=cpu, batch_invariant=True).decodes_per_read == 1


def test_torch_computes_where_there_is_no_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "COMPILERS", ("no-such-compiler",))
    with caplog.at_level(logging.WARNING):
        found = chosen("auto")
    assert (found.kind, type(found.layer_ops)) == ("torch", TorchLayerOps)
    assert caplog.messages == [
        "attention and layer operations run on torch, which is slower: there is no C compiler (no-such-compiler)"
    ]


def test_native_that_is_insisted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(ValueError, match="there is no C compiler"):
        chosen("native")


@needs_compiler
def test_torch_that_is_asked_for(own_cache: Path) -> None:
    assert chosen("torch").kind == "torch"
    assert not own_cache.exists()


@needs_compiler
def test_native_is_the_default_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # with the user's cache: our own kernels take their time to compile
    found = chosen("auto")
    assert (found.kind, type(found.layer_ops)) == ("native", NativeLayerOps)
    assert isinstance(found.plan_attention(np.array([1]), np.array([5]), StepTables.of(np.array([[0]]))), NativePlan)
