"""What the cluster form costs on one machine: seconds until all of it is ready, by the clock and of processors,
memory, and what its address adds to a request.

Three forms with a simulated engine, one after another: a server alone, ``neaptide cluster``, and Ray Serve where it is
installed. Memory is the proportional share (PSS), so that what processes share is counted once; processes are told
apart by what they are for. Processor time is nearly the same on a busy machine as on a still one, the other times are
not. Each form has a database of its own, which ``--store`` must be allowed to create.

    python -m lab.benchmarks.cluster_cost --store postgresql://neaptide@/postgres?host=/run/postgresql

Prints a table, then one JSON line.
"""

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.common import print_table
from lab.benchmarks.shared_batches import new_database
from neaptide.commands.server_process import free_port
from neaptide.engine.process.beside import beside

MANIFEST = Path(__file__).parents[2] / "deploy" / "ray" / "serve.yaml"
LONGEST_START_S = 300.0
BODY = {"model": "neaptide-tiny", "prompt": "2+2=", "max_tokens": 1}
ENGINE, REPLICA = "neaptide.launch.serve", "neaptide.cluster.launch.replica"


def command_of(form: str, replicas: int, store: str, directory: Path, port: int) -> list[str]:
    settings: dict[str, Any] = {"store": store, "executor": "sim", "sim_step_ms": 0, "shadow": "off"}
    if form == "ray":
        manifest = yaml.safe_load(MANIFEST.read_text())
        manifest["http_options"] = {"host": "127.0.0.1", "port": port}
        (application,) = manifest["applications"]
        application["args"] |= settings | {
            "data_dir": str(directory / "data"),
            "blobs": (directory / "blobs").as_uri(),
        }
        for deployment in application["deployments"]:
            deployment["ray_actor_options"] = {"num_cpus": 0}
            if deployment["name"] == "replica":
                deployment["num_replicas"] = replicas
        (directory / "serve.yaml").write_text(yaml.safe_dump(manifest))
        return [sys.executable, "-m", "ray.serve.scripts", "run", str(directory / "serve.yaml")]
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--data-dir", str(directory / "data"), "--port", str(port)]
    words = ["serve"] if form == "one" else ["cluster", "--replicas", str(replicas)]
    return [sys.executable, "-m", "neaptide", *words, *flags]


@contextmanager
def running(form: str, replicas: int, store: str, directory: Path) -> Iterator[tuple[psutil.Process, str, float]]:
    """The form's first process, its address, and the seconds until all of it was ready."""
    port = free_port()
    command = command_of(form, replicas, store, directory, port)
    # Its own Ray instance, not announced to other processes.
    env = os.environ | {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"}
    url, start_s = f"http://127.0.0.1:{port}", time.monotonic()
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(beside(command), stdout=log, stderr=log, env=env)
    try:
        while not is_ready(form, replicas, url):
            if process.poll() is not None or time.monotonic() - start_s > LONGEST_START_S:
                raise SystemExit(f"{form} did not become ready:\n{(directory / 'log').read_text()[-2000:]}")
            time.sleep(0.05)
        yield psutil.Process(process.pid), url, time.monotonic() - start_s
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60.0)
        except subprocess.TimeoutExpired:
            process.kill()


def is_ready(form: str, replicas: int, url: str) -> bool:
    try:
        if form == "one":
            return httpx.get(f"{url}/ready").status_code == 200
        found = httpx.get(f"{url}/cluster").json()["replicas"]
        return [one["state"] for one in found] == ["ready"] * replicas
    except (httpx.HTTPError, ValueError, KeyError):
        return False


def memory_mib(process: psutil.Process) -> dict[str, float]:
    """By what processes are for: API processes of replicas, engines, and what stands before them."""
    found = {"api": 0.0, "engines": 0.0, "before": 0.0}
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.Error, FileNotFoundError):
            words = one.cmdline()
            kind = "engines" if ENGINE in words else "api" if REPLICA in words or "serve" in words[3:4] else "before"
            found[kind] += one.memory_full_info().pss / 2**20
    return found


def processor_s(process: psutil.Process) -> float:
    """CPU seconds of a form's processes since their start, including ended children."""
    found = 0.0
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            found += sum(one.cpu_times()[:4])  # its own, and its children's that have ended
    return found


def request_ms(url: str, count: int) -> float:
    """Median of requests that are sent one after another, on one connection."""
    taken = []
    with httpx.Client(base_url=url) as http:
        for _ in range(count):
            start_s = time.perf_counter()
            http.post("/v1/completions", json=BODY).raise_for_status()
            taken.append(1e3 * (time.perf_counter() - start_s))
    return statistics.median(taken)


def measure(form: str, args: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        store = new_database(args.store, f"neaptide_bench_{form}")
        with running(form, args.replicas, store, Path(name)) as (process, url, start_s):
            start_cpu_s = processor_s(process)
            time.sleep(args.rest_s)
            found = {
                "start_s": start_s,
                "start_cpu_s": start_cpu_s,
                **memory_mib(process),
                "request_ms": request_ms(url, args.requests),
            }
    return {key: round(value, 2) for key, value in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks.cluster_cost", description=__doc__)
    parser.add_argument("--store", required=True, metavar="URL", help="a PostgreSQL database")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rest-s", type=float, default=5.0, help="after the start, before memory is looked at")
    args = parser.parse_args(argv)
    forms = ["one", "cluster", *(["ray"] if importlib.util.find_spec("ray") is not None else [])]
    found = {form: measure(form, args) for form in forms}
    columns = list(found["one"])
    print_table(
        "cost of a form (seconds, MiB, ms)",
        ["form", *columns],
        [(form, *(str(found[form][column]) for column in columns)) for form in forms],
    )
    print(json.dumps({"replicas": args.replicas, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
