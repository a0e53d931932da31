"""How long an engine's step waits for a claimed chunk of a large file to be taken in, by the size of both.

What servers that share a batch give their engines: one message for each chunk, each a job of its own, all of one token
file with its prefix tree. The pool takes in chunk after chunk while rows of those before are handed out.

    python -m lab.benchmarks.chunk_stall

Processor time, which is nearly the same on a busy machine as on a still one. Prints a table, milliseconds of one
message, then one JSON line.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import print_table
from neaptide.engine.messages import AddBatch
from neaptide.engine.offline.pool import OfflinePool
from neaptide.engine.offline.prefix_tree import PrefixTree, write_prefixes
from neaptide.engine.offline.sharing.by_shares import ByShares
from neaptide.engine.offline.token_file import TokenFileWriter
from neaptide.engine.params import SamplingParams

GROUP_ROWS, PREFIX_TOKENS, OWN_TOKENS = 50, 256, 48
"""Few-shot prompts: rows that share a prefix, and tokens of the prefix and of the rest."""
MAX_NUM_TOKENS = 4096
PARAMS = SamplingParams(max_tokens=32)


def write_file(stem: Path, num_rows: int, seed: int) -> list[int]:
    """Rows in any order; returns the tree's order of them."""
    random = np.random.default_rng(seed)
    prefixes = random.integers(0, 8192, (-(-num_rows // GROUP_ROWS), PREFIX_TOKENS), np.int32)
    with TokenFileWriter(stem) as writer:
        for row in random.permutation(num_rows).tolist():
            own = random.integers(0, 8192, OWN_TOKENS, np.int32)
            writer.append(np.concatenate((prefixes[row // GROUP_ROWS], own)))
    write_prefixes(stem)
    order: list[int] = PrefixTree.load(stem, num_rows).rows.tolist()
    return order


def stalls_ms(stem: Path, order: list[int], chunk_rows: int, num_chunks: int, num_held: int) -> list[float]:
    """Time of each message, including the first one, which reads the file."""
    pool, taken_ms = OfflinePool(by_prefix=True, turns=ByShares({})), []
    for number in range(num_chunks):
        rows = order[number * chunk_rows : (number + 1) * chunk_rows]
        message = AddBatch(
            batch_id=f"batch.{number}.1",
            path=str(stem),
            rows=rows,
            params_table=[PARAMS],
            params_index=[0] * len(rows),
            stream_rows=[],
            deadline_s=1e6,
            salt=b"",
            share="",
        )
        start_s = time.thread_time()
        refused = pool.add_batch(message, 0.0, MAX_NUM_TOKENS)
        taken_ms.append(1e3 * (time.thread_time() - start_s))
        assert not refused
        while len(pool) > num_held * chunk_rows:
            pool.pop()
    return taken_ms


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks.chunk_stall", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000, 50_000])
    parser.add_argument("--chunk-rows", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--chunks", type=int, default=40)
    parser.add_argument("--held", type=int, default=4, help="chunks whose rows wait")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    found = []
    with tempfile.TemporaryDirectory() as name:
        for num_rows in args.rows:
            stem = Path(name) / str(num_rows)
            order = write_file(stem, num_rows, args.seed)
            for chunk_rows in args.chunk_rows:
                first, *others = stalls_ms(stem, order, chunk_rows, args.chunks, args.held)
                found.append(
                    {
                        "rows": num_rows,
                        "chunk_rows": chunk_rows,
                        "first_ms": round(first, 3),
                        "median_ms": round(statistics.median(others), 3),
                        "max_ms": round(max(others), 3),
                    }
                )
    columns = list(found[0])
    print_table(
        "a chunk taken in (ms of a processor)", columns, [[str(one[column]) for column in columns] for one in found]
    )
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
