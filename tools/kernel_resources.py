"""Compiles Triton's kernels for a GPU on any machine, and reports registers, spills, shared memory and matrix
instructions.

    python -m tools.kernel_resources [--arch 80,90] [--types bf16,fp32]

Triton's wheel includes the assembler; nothing is run. Prints a table, then one JSON line. Another version of Triton
may change any figure.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from neaptide.kernels.kv_copy.kernel import copy_kernel
from neaptide.kernels.kv_write.kernel import write_kernel
from neaptide.kernels.kv_write.launch import HEADS_EACH
from neaptide.kernels.prefix_attention.attention import FP32_PRECISION
from neaptide.kernels.prefix_attention.kernel import attend_kernel, merge_kernel
from neaptide.kernels.prefix_attention.tiles import Tiles, load_tiles, pick_tiles

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
BLOCK_SIZE = 16
ALIGNED = [["tt.divisibility", 16]]
"""Alignment of torch's pointers and of strides of whole heads. Without it nothing is copied in pieces of 16 bytes."""
HEADS = ((9, 3, 64), (32, 8, 128), (16, 8, 256))
"""Query heads, KV heads and dim: the 111M model, Llama-3.1-8B, and the largest heads with tiles."""


ELEMENT_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Resources:
    kernel: str
    shape: str
    arch: int
    """Compute capability times ten."""
    warps: int
    registers: int
    """Registers per thread."""
    stack_bytes: int
    """Stack bytes per thread: what did not fit into registers."""
    shared_bytes: int
    """Shared memory per thread block."""
    wgmma: int
    """Warp-group products in the code."""
    mma: int
    """Warp products in the code."""
    copies: int
    """Asynchronous copies into shared memory, 16 bytes per thread."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is launched."""

    kernel: Any
    shape: str
    pointers: dict[str, str]
    """Argument -> type that it points to."""
    scalars: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]

    def resources(self, arch: int) -> Resources:
        """Compiles the kernel for a compute capability."""
        signature = {name: f"*{kind}" for name, kind in self.pointers.items()} | self.scalars
        signature |= dict.fromkeys(self.constants, "constexpr")
        names = self.kernel.arg_names
        aligned = [*self.pointers, *(name for name in self.scalars if name.endswith("_stride"))]
        source = ASTSource(self.kernel, signature, self.constants, {(names.index(name),): ALIGNED for name in aligned})
        options = self.options | {"enable_fp_fusion": True}
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        registers, stack_bytes = _registers(compiled.asm["cubin"])
        text = compiled.asm["ptx"]
        return Resources(
            kernel=self.kernel.__name__,
            shape=self.shape,
            arch=arch,
            warps=self.options["num_warps"],
            registers=registers,
            stack_bytes=stack_bytes,
            shared_bytes=compiled.metadata.shared,
            wgmma=text.count("wgmma.mma_async"),
            mma=text.count("mma.sync"),
            copies=text.count("cp.async.cg"),
        )


def _registers(binary: bytes) -> tuple[int, int]:
    """Registers per thread and bytes of the stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"{CUOBJDUMP} does not report registers: {text}")
    return int(found[1]), int(found[2])


def launches(types: Sequence[str]) -> Iterator[Launch]:
    """Attention for the shapes above in these types, and every other kernel for one shape in bf16."""
    entries = load_tiles()
    for heads, kv_heads, dim in HEADS:
        for kind in types:
            tiles = pick_tiles(entries, dim, heads // kv_heads, ELEMENT_BYTES[kind], "")
            assert tiles is not None
            yield attention(heads, kv_heads, dim, kind, tiles)
    heads, kv_heads, dim = HEADS[1]
    shape = f"{heads}/{kv_heads} heads of {dim}, bf16"
    yield Launch(
        merge_kernel,
        shape,
        {"out": "bf16", "parts": "fp32", "part_scales": "fp32", "merges": "i32"},
        {},
        {"HEADS": heads, "DIM": dim, "LANES": dim},
        {"num_warps": 1},
    )
    int_arrays = dict.fromkeys(("table", "token_tables", "token_limits"), "i32")
    yield Launch(
        write_kernel,
        shape,
        {"heads": "bf16", "rotation": "fp32", "kv_cache": "bf16"} | int_arrays,
        {"token_stride": "i32"},
        {
            "QUERY_HEADS": heads,
            "KV_HEADS": kv_heads,
            "DIM": dim,
            "BLOCK_SIZE": BLOCK_SIZE,
            "HEADS_EACH": HEADS_EACH,
            "PAIRS": dim // 2,
            "ROTATES": True,
        },
        {"num_warps": 4},
    )
    row = 2 * kv_heads * dim
    for into_cache in (False, True):
        yield Launch(
            copy_kernel,
            f"{shape}, {'into the cache' if into_cache else 'out of it'}",
            {"kv_cache": "bf16", "copied": "bf16", "slots": "i64"},
            {"layer_stride": "i64"},
            {"LAYERS": 32, "ROW": row, "LANES": row, "INTO_CACHE": into_cache},
            {"num_warps": 4},
        )


def attention(heads: int, kv_heads: int, dim: int, kind: str, tiles: Tiles) -> Launch:
    return Launch(
        attend_kernel,
        f"{heads}/{kv_heads} heads of {dim}, {kind}, tiles of {tiles.wide_rows} x {tiles.wide_keys}",
        dict.fromkeys(("query", "kv_cache", "out"), kind)
        | {"parts": "fp32", "part_scales": "fp32"}
        | dict.fromkeys(("items", "table", "row_tokens", "row_limits", "row_parts"), "i32"),
        {"query_stride": "i32", "scale": "fp32"},
        {
            "KV_HEADS": kv_heads,
            "GROUP": heads // kv_heads,
            "DIM": dim,
            "BLOCK_SIZE": BLOCK_SIZE,
            "WIDE_ROWS": tiles.wide_rows,
            "WIDE_KEYS": tiles.wide_keys,
            "NARROW_ROWS": tiles.narrow_rows,
            "NARROW_KEYS": tiles.narrow_keys,
            "LANES": max(16, 1 << (dim - 1).bit_length()),
            "STAGES": tiles.stages,
            "PRECISION": FP32_PRECISION,
            "UPCAST": False,
        },
        {"num_warps": tiles.warps, "num_stages": tiles.stages, "maxnreg": tiles.registers},
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.kernel_resources", description=__doc__)
    parser.add_argument("--arch", default="80,90", help="compute capabilities, times ten")
    parser.add_argument("--types", default=",".join(ELEMENT_BYTES), help="types to compile attention for")
    args = parser.parse_args(argv)
    archs = [int(arch) for arch in args.arch.split(",")]
    found = [launch.resources(arch) for launch in launches(args.types.split(",")) for arch in archs]
    print("sm  warps  registers  stack  shared bytes  wgmma  mma  copies  kernel")
    for each in found:
        print(
            f"{each.arch:2}  {each.warps:5}  {each.registers:9}  {each.stack_bytes:5}  {each.shared_bytes:12}  "
            f"{each.wgmma:5}  {each.mma:3}  {each.copies:6}  {each.kernel}, {each.shape}"
        )
    print(json.dumps({"triton": triton.__version__, "kernels": [asdict(each) for each in found]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
