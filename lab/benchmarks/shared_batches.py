"""What a second server on the same database brings, and what claims cost the first.

One batch by turns in three forms: a server that has the database for itself, one that claims (``--blobs``), and two
that do. The engine is simulated, with steps of a fixed time, so that what is measured is everything around it. Each
run has a database of its own, which ``--store``, on this machine, must be allowed to create.

    createdb neaptide-bench
    python -m lab.benchmarks.shared_batches --store postgresql://neaptide@/neaptide-bench?host=/run/postgresql

Prints a table, then one JSON line: lines/s from the first result that is seen to the last, and what they are made of.
``filled`` is the share of the seats that steps had filled, so what claims that come late cost, whatever a step takes;
processor time (API processes, their children, the database) is what they cost a machine that has none to spare.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import sqlalchemy as sa

from benchmarks.common import print_table
from neaptide.commands.server_process import ServerProcess

FORMS = {"alone": 1, "sharing": 1, "two": 2}
ENDPOINT = "/v1/completions"
MODEL = "neaptide-tiny"
STEPS = 'neaptide_step_seconds_count{phase="total"}'
POLL_S = 0.1
LONGEST_START_S = 900.0
"""Start limit of a server on a machine that others use."""


def lines_of(count: int, output_tokens: int) -> bytes:
    body = {"model": MODEL, "prompt": "2+2=", "max_tokens": output_tokens, "ignore_eos": True}
    lines = ({"custom_id": f"c{i}", "method": "POST", "url": ENDPOINT, "body": body} for i in range(count))
    return "\n".join(json.dumps(line) for line in lines).encode()


async def begin_batch(http: httpx.AsyncClient, content: bytes) -> str:
    files = {"file": ("lines.jsonl", content, "application/jsonl")}
    upload = (await http.post("/v1/files", files=files, data={"purpose": "batch"})).raise_for_status().json()
    body = {"input_file_id": upload["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    return str((await http.post("/v1/batches", json=body)).raise_for_status().json()["id"])


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run, from the first visible result to the last. ``filled`` is over all of its steps, since a wave
    of lines that end together would be an error of several percent. CPU times are per 1,000 lines."""

    lines_per_s: float
    filled: float
    api_ms: float
    children_ms: float
    database_ms: float


COLUMNS = ("lines/s", "seats filled", "API ms", "children ms", "database ms")


@dataclass(frozen=True, slots=True)
class Look:
    """What has been done until now."""

    at_s: float
    lines: int
    steps: int
    api_s: float
    children_s: float
    database_s: float


class Watch:
    """A running form. ``postmaster`` is the database's first process."""

    def __init__(self, servers: Sequence[ServerProcess], http: httpx.AsyncClient, postmaster: psutil.Process) -> None:
        self._servers = servers
        self._http = http
        self._postmaster = postmaster

    async def run(self, batch_id: str, output_tokens: int, max_num_seqs: int) -> Figures:
        first: Look | None = None
        while True:
            reply = await self._http.get(f"/v1/batches/{batch_id}")
            counts: dict[str, int] = reply.raise_for_status().json()["request_counts"]
            if counts["completed"] and first is None:
                first = await self._look(counts["completed"])
            if first is not None and counts["completed"] == counts["total"]:
                return figures(first, await self._look(counts["total"]), output_tokens, max_num_seqs)
            await asyncio.sleep(POLL_S)

    async def _look(self, lines: int) -> Look:
        at_s = asyncio.get_running_loop().time()
        steps = 0
        for server in self._servers:
            text = (await self._http.get(f"{server.base_url}/metrics")).raise_for_status().text
            found = (line for line in text.splitlines() if line.startswith(STEPS))
            steps += sum(int(float(line.split()[-1])) for line in found)
        processes = [psutil.Process(server.pid) for server in self._servers]
        api_s = sum(map(own_s, processes))
        children_s = sum(own_s(child) for process in processes for child in process.children())
        return Look(at_s, lines, steps, api_s, children_s, sum(map(own_s, tree(self._postmaster))))


def figures(first: Look, last: Look, output_tokens: int, max_num_seqs: int) -> Figures:
    lines = last.lines - first.lines
    per_1000 = 1e6 / max(lines, 1)
    return Figures(
        lines / max(last.at_s - first.at_s, POLL_S),
        last.lines * output_tokens / (max(last.steps, 1) * max_num_seqs),
        (last.api_s - first.api_s) * per_1000,
        (last.children_s - first.children_s) * per_1000,
        (last.database_s - first.database_s) * per_1000,
    )


def own_s(process: psutil.Process) -> float:
    """Processor time, that of its children not counted unless they have ended."""
    times = process.cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def tree(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def postmaster_of(store: str) -> psutil.Process:
    """The database's first process."""
    plain = sa.make_url(store).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain) as connection:
        found = psutil.Process(connection.info.backend_pid).parent()
    if found is None:
        raise SystemExit("the database does not run on this machine")
    return found


def new_database(store: str, name: str) -> str:
    """Its address; one of the same name is dropped."""
    url = sa.make_url(store)
    plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")  # type: ignore[arg-type]
        connection.execute(f"CREATE DATABASE {name} ENCODING 'UTF8' TEMPLATE template0")  # type: ignore[arg-type]
    return url.set(drivername="postgresql", database=name).render_as_string(hide_password=False)


async def run_form(args: argparse.Namespace, form: str, directory: Path) -> Figures:
    flags = ["--store", new_database(args.store, f"neaptide_bench_{form}"), "--executor", "sim", "--shadow", "off"]
    flags += ["--sim-step-ms", str(args.step_ms), "--max-num-seqs", str(args.max_num_seqs)]
    # Steps take what they take: no target is to keep lines out of them.
    flags += ["--ttft-slo-ms", "600000", "--tpot-slo-ms", "60000"]
    if form != "alone":
        flags += ["--blobs", f"file://{directory}/blobs"]
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(ServerProcess(flags, directory / str(number), LONGEST_START_S))
            for number in range(FORMS[form])
        ]
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=servers[0].base_url, timeout=None))
        batch_id = await begin_batch(http, lines_of(args.lines, args.output_tokens))
        watch = Watch(servers, http, postmaster_of(args.store))
        return await watch.run(batch_id, args.output_tokens, args.max_num_seqs)


async def measure(args: argparse.Namespace) -> dict[str, list[Figures]]:
    found: dict[str, list[Figures]] = {form: [] for form in args.forms}
    for _ in range(args.turns):
        for form in args.forms:
            with tempfile.TemporaryDirectory() as directory:
                found[form].append(await run_form(args, form, Path(directory)))
            print(f"{form}: {found[form][-1]}", file=sys.stderr, flush=True)
    return found


def result(found: dict[str, list[Figures]]) -> dict[str, Any]:
    """Medians over the turns, and their ratios; None where a form did not run."""
    medians = {
        form: Figures(*map(statistics.median, zip(*map(astuple, runs), strict=True))) for form, runs in found.items()
    }
    return {
        **{form: {name: round(value, 3) for name, value in asdict(one).items()} for form, one in medians.items()},
        "two_over_one": ratio(medians, "two", "sharing", "lines_per_s"),
        "claimed_over_alone": ratio(medians, "sharing", "alone", "lines_per_s"),
        "claimed_over_alone_in_steps": ratio(medians, "sharing", "alone", "filled"),
        "turns": max(map(len, found.values())),
    }


def ratio(medians: dict[str, Figures], form: str, other: str, field: str) -> float | None:
    if form not in medians or other not in medians:
        return None
    return round(float(getattr(medians[form], field) / getattr(medians[other], field)), 4)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks.shared_batches", description=__doc__)
    parser.add_argument("--store", required=True, metavar="URL", help="a PostgreSQL database")
    parser.add_argument("--lines", type=int, default=5_000)
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    args = parser.parse_args(argv)
    found = asyncio.run(measure(args))
    table = [(form, *(f"{value:.3g}" for value in astuple(one))) for form, runs in found.items() for one in runs]
    print_table("processor time of 1,000 lines", ["form", *COLUMNS], table)
    print(json.dumps(result(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
