"""Finds the best tiles of the attention kernel on this device, and writes them into the file that servers read.

    python -m benchmarks.gpu.tune_attention [--heads 32 --kv-heads 8 --head-dim 128] [--out FILE] [--dry]

Every candidate is timed on the steps of ``benchmarks.gpu.kernels``. The one with the least geometric mean is kept for
this device and these heads, after the file's other entries. Candidates that do not compile or do not fit are skipped.
Run it on the device, but never while serving. With ``--dry`` two candidates run on the CPU in Triton's interpreter
(TRITON_INTERPRET=1). Those times mean nothing, and nothing is written unless ``--out`` names a file.
"""

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.gpu.kernels import DRY_STEPS, STEPS, step_seconds
from benchmarks.gpu.random_llama import LLAMA_8B, LlamaShape
from neaptide.kernels.launching import why_not
from neaptide.kernels.prefix_attention.tiles import FILE, TileEntry, Tiles, load_tiles

REGISTERS = 200


def candidates() -> Iterator[Tiles]:
    for wide_rows, wide_keys, narrow_keys, stages, warps in itertools.product(
        (64, 128), (32, 64, 128), (32, 64, 128), (2, 3, 4), (4, 8)
    ):
        yield Tiles(
            wide_rows=wide_rows,
            wide_keys=wide_keys,
            narrow_rows=16,
            narrow_keys=narrow_keys,
            stages=stages,
            warps=warps,
            registers=REGISTERS,
        )


def tune(shape: LlamaShape, device: torch.device, *, dry: bool) -> tuple[Tiles, float]:
    """The best candidate, and the geometric mean of its times in seconds.

    Raises:
        RuntimeError: no candidate runs.
    """
    best: tuple[Tiles, float] | None = None
    steps = DRY_STEPS if dry else STEPS
    for tiles in itertools.islice(candidates(), 2 if dry else None):
        try:
            seconds = [step_seconds(step, shape, tiles, device, dry=dry) for step in steps]
        except Exception as error:  # too much shared memory, or any other error of the compiler
            print(f"{tiles}: skipped, {type(error).__name__}", flush=True)
            continue
        mean_s = math.exp(sum(map(math.log, seconds)) / len(seconds))
        print(f"{tiles}: {mean_s * 1e6:.1f} us", flush=True)
        if best is None or mean_s < best[1]:
            best = tiles, mean_s
    if best is None:
        raise RuntimeError("no candidate runs on this device")
    return best


def write(path: Path, found: TileEntry) -> None:
    """Writes the entry in place of the file's entry for the same device and heads, or else at the end."""
    same = ("element_bytes", "head_dim", "group", "device")
    kept = [entry for entry in load_tiles() if any(getattr(entry, name) != getattr(found, name) for name in same)]
    rows = [dataclasses.asdict(entry) for entry in [*kept, found]]
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.tune_attention", description=__doc__)
    parser.add_argument("--heads", type=int, default=LLAMA_8B.heads)
    parser.add_argument("--kv-heads", type=int, default=LLAMA_8B.kv_heads)
    parser.add_argument("--head-dim", type=int, default=LLAMA_8B.head_dim)
    parser.add_argument("--out", type=Path, help=f"file to write ({FILE.name} of the package)")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args(argv)
    device = torch.device("cpu" if args.dry else "cuda")
    if reason := why_not(device):
        print(f"tune_attention: {reason}", file=sys.stderr)
        return 2
    shape = dataclasses.replace(LLAMA_8B, heads=args.heads, kv_heads=args.kv_heads, head_dim=args.head_dim)
    with torch.inference_mode():
        tiles, mean_s = tune(shape, device, dry=args.dry)
    name = "cpu" if args.dry else torch.cuda.get_device_name()
    source = f"timed on {name}: {mean_s * 1e6:.1f} us, geometric mean of the steps"
    found = TileEntry(
        element_bytes=2,
        head_dim=args.head_dim,
        group=args.heads // args.kv_heads,
        device=name,
        source=source,
        tiles=tiles,
    )
    out = args.out or (None if args.dry else FILE)
    if out is not None:
        write(out, found)
    print(json.dumps(dataclasses.asdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
