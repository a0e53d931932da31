"""What a second server on the same database brings, and what claims cost the first.

One batch by turns in three forms: a server that has the database for itself, one that claims (``--blobs``), and two
that do. The engine is simulated, with steps of a fixed time, so that what is measured is everything around it. Each
run has a database of its own, which ``--store`` must be allowed to create.

    createdb neaptide-bench
    python -m benchmarks.shared_batches --store postgresql://neaptide@/neaptide-bench?host=/run/postgresql

Prints a table, then one JSON line: lines/s from the first result that is seen to the last.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import psycopg
import sqlalchemy as sa

from benchmarks.common import print_table
from neaptide.commands.server_process import ServerProcess

FORMS = {"alone": 1, "sharing": 1, "two": 2}
ENDPOINT = "/v1/completions"
MODEL = "neaptide-tiny"
POLL_S = 0.1
LONGEST_START_S = 900.0
"""Of a server on a machine that others use."""


def lines_of(count: int, output_tokens: int) -> bytes:
    body = {"model": MODEL, "prompt": "2+2=", "max_tokens": output_tokens, "ignore_eos": True}
    lines = ({"custom_id": f"c{i}", "method": "POST", "url": ENDPOINT, "body": body} for i in range(count))
    return "\n".join(json.dumps(line) for line in lines).encode()


async def begin_batch(http: httpx.AsyncClient, content: bytes) -> str:
    files = {"file": ("lines.jsonl", content, "application/jsonl")}
    upload = (await http.post("/v1/files", files=files, data={"purpose": "batch"})).raise_for_status().json()
    body = {"input_file_id": upload["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    return str((await http.post("/v1/batches", json=body)).raise_for_status().json()["id"])


async def lines_per_s(http: httpx.AsyncClient, batch_id: str) -> float:
    """Between two looks: the first that sees results, and the first that sees all of them."""
    loop = asyncio.get_running_loop()
    first: tuple[float, int] | None = None
    while True:
        counts: dict[str, int] = (await http.get(f"/v1/batches/{batch_id}")).raise_for_status().json()["request_counts"]
        now_s = loop.time()
        if counts["completed"] and first is None:
            first = (now_s, counts["completed"])
        if first is not None and counts["completed"] == counts["total"]:
            return (counts["completed"] - first[1]) / max(now_s - first[0], POLL_S)
        await asyncio.sleep(POLL_S)


def new_database(store: str, name: str) -> str:
    """Its address; one of the same name is dropped."""
    url = sa.make_url(store)
    plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")  # type: ignore[arg-type]
        connection.execute(f"CREATE DATABASE {name} ENCODING 'UTF8' TEMPLATE template0")  # type: ignore[arg-type]
    return url.set(drivername="postgresql", database=name).render_as_string(hide_password=False)


async def run_form(args: argparse.Namespace, form: str, directory: Path) -> float:
    flags = ["--store", new_database(args.store, f"neaptide_bench_{form}"), "--executor", "sim", "--shadow", "off"]
    flags += ["--sim-step-ms", str(args.step_ms), "--max-num-seqs", str(args.max_num_seqs)]
    if form != "alone":
        flags += ["--blobs", f"file://{directory}/blobs"]
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(ServerProcess(flags, directory / str(number), LONGEST_START_S))
            for number in range(FORMS[form])
        ]
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=servers[0].base_url, timeout=60.0))
        return await lines_per_s(http, await begin_batch(http, lines_of(args.lines, args.output_tokens)))


async def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(args.turns):
        for form in FORMS:
            with tempfile.TemporaryDirectory() as directory:
                found[form].append(await run_form(args, form, Path(directory)))
    return found


def result(found: dict[str, list[float]]) -> dict[str, Any]:
    """Medians over the turns, and their ratios."""
    medians = {form: statistics.median(values) for form, values in found.items()}
    return {
        "lines_per_s": {form: round(value, 2) for form, value in medians.items()},
        "two_over_one": round(medians["two"] / medians["sharing"], 3),
        "claims_cost": round(1.0 - medians["sharing"] / medians["alone"], 4),
        "turns": len(found["alone"]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_batches", description=__doc__)
    parser.add_argument("--store", required=True, metavar="URL", help="a PostgreSQL database")
    parser.add_argument("--lines", type=int, default=5_000)
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args(argv)
    found = asyncio.run(measure(args))
    table = [(form, *(f"{value:.1f}" for value in values)) for form, values in found.items()]
    print_table("lines/s", ["form", *(f"turn {n + 1}" for n in range(args.turns))], table)
    print(json.dumps(result(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
