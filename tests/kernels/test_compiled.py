"""What the kernels take on GPUs, by compiling them here: a regression is seen without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.test_triton import needs_triton

REPOSITORY = Path(__file__).parents[2]
MOST_REGISTERS = 200
SHARED_BYTES_OF_TWO = {80: 164 * 1024 // 2 - 1024, 90: 228 * 1024 // 2 - 1024}
"""So much may a block of threads take where two are to run on one processor (A100, H100)."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """In a process of its own and without a cache of earlier compilations."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-m", "tools.kernel_resources", "--types", "bf16"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["kernels"]
    return found


@needs_triton
def test_nothing_is_spilled_and_registers_are_left(compiled: list[dict[str, Any]]) -> None:
    assert {each["arch"] for each in compiled} == {80, 90}
    assert {each["kernel"] for each in compiled} == {"attend_kernel", "merge_kernel", "write_kernel", "copy_kernel"}
    wrong = [each for each in compiled if each["stack_bytes"] > 0 or each["registers"] > MOST_REGISTERS]
    assert not wrong


@needs_triton
def test_two_blocks_of_attention_fit_on_a_processor(compiled: list[dict[str, Any]]) -> None:
    """With heads of up to 128 in bf16, at 4 warps."""
    small = [each for each in compiled if each["kernel"] == "attend_kernel" and each["warps"] == 4]
    assert len(small) == 4
    wrong = [each for each in small if each["shared_bytes"] > SHARED_BYTES_OF_TWO[each["arch"]]]
    assert not wrong


@needs_triton
def test_wide_tiles_are_multiplied_by_warp_groups_and_keys_arrive_in_time(compiled: list[dict[str, Any]]) -> None:
    """On sm_90; narrow tiles, and all of sm_80, by warps. Keys and values are on their way while others are used."""
    attention = [each for each in compiled if each["kernel"] == "attend_kernel"]
    assert len(attention) == 6
    for each in attention:
        assert (each["wgmma"] > 0) == (each["arch"] == 90), each
        assert each["mma"] > 0, each
        assert each["copies"] > 0, each
