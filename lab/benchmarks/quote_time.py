"""How long a quote takes: ``POST /v1/batches/quote`` for a file of 50,000 lines on a server with 14 days of record.

One real server with a simulated executor. Aggregates of two weeks are in its database before it starts. The file is
uploaded once and quoted several times. The first quote also starts the process that measures files.

    python -m lab.benchmarks.quote_time [--lines 50000] [--quotes 5] [--days 14]

Prints a table, then one JSON line. Exit status 1 unless every quote takes at most 2 s.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import EMBEDDED, print_table
from benchmarks.live.plan import START_TIMEOUT_S
from lab.benchmarks.record_cost import recorded_periods
from lab.benchmarks.submission import content_of
from neaptide.commands.server_process import ServerProcess
from neaptide.server.batches.storing import period_rows
from neaptide.server.batches.storing.store import Store
from neaptide.server.quotes.desk import ALONE

BAR_S = 2.0
MIB = 1 << 20


async def record(data_dir: Path, days: float) -> int:
    """Stores aggregates of the last days, as a server with traffic leaves them; returns how many."""
    store, periods = Store(data_dir), recorded_periods(time.time(), days)
    store.open()
    for period in periods:
        await store.write_beside(period_rows.add_period, ALONE, period)
    store.close()
    return len(periods)


async def measure(lines: int, quotes: int, days: float) -> dict[str, Any]:
    content = content_of(lines)
    flags = [str(EMBEDDED), "--served-model-name", "m", "--shadow", "off", "--executor", "sim"]
    with tempfile.TemporaryDirectory() as directory:
        num_periods = await record(Path(directory) / "data", days)
        async with (
            ServerProcess(flags, Path(directory), START_TIMEOUT_S) as server,
            httpx.AsyncClient(base_url=server.base_url, timeout=600.0) as http,
        ):
            files = {"file": ("lines.jsonl", content, "application/jsonl")}
            upload = (await http.post("/v1/files", files=files, data={"purpose": "batch"})).raise_for_status().json()
            times_s = []
            for _ in range(quotes):
                begin_s = time.perf_counter()
                reply = await http.post("/v1/batches/quote", json={"input_file_id": upload["id"]})
                times_s.append(time.perf_counter() - begin_s)
            quote = reply.raise_for_status().json()
    return summary(times_s, quote, num_periods, len(content))


def summary(times_s: Sequence[float], quote: dict[str, Any], num_periods: int, num_bytes: int) -> dict[str, Any]:
    """
    Args:
        times_s: of the quotes, in order.
        quote: the last reply.
    """
    return {
        "lines": quote["lines"],
        "mib": num_bytes / MIB,
        "periods": num_periods,
        "recorded_s": quote["basis"]["recorded_seconds"],
        "first_s": times_s[0],
        "quotes_s": [round(one, 3) for one in times_s],
        "slowest_s": max(times_s),
        "load_average": os.getloadavg()[0],
        "holds": max(times_s) <= BAR_S,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--quotes", type=int, default=5)
    parser.add_argument("--days", type=float, default=14.0, help="of record that the server has when it starts")
    args = parser.parse_args(argv)
    found = asyncio.run(measure(args.lines, args.quotes, args.days))
    title = f"{found['lines']:,} lines, {found['mib']:.0f} MiB, {found['periods']:,} periods"
    print_table(
        title, ["quote of the file", "seconds"], [[number, one] for number, one in enumerate(found["quotes_s"], 1)]
    )
    print(json.dumps(found))
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
