"""Processor time of the API process for a token and for a request, by the number of streams.

The server is ``neaptide serve`` with an engine that computes nothing (``benchmarks.scripted_engine``), and the clients
are plain sockets of this process. So the API process is what is measured. Its tokens a second of processor time are
what one core can deliver, roughly even on a machine with neighbours.

    python -m benchmarks.api_process [--streams 10,500,2000] [--seconds 8] [--turns 3] [--before DIR] [--out FILE]
    python -m benchmarks.api_process --other "--api-processes 2" --streams 500 --loads ""

``--before`` names another checkout of this project, whose server takes turns with this one. ``--other`` gives the flags
of another server of this checkout, which takes turns too. With several API processes all streams run through those that
have no engine (``fronts``), so that the time of the one that has it (``owner``) is what they cost it for a token.

Then short chats arrive at fractions of the rate that the server can answer (``--loads``): who is served in time, and
how soon the others are refused. Prints tables, then one JSON line.
"""

import argparse
import json
import os
import resource
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.common import REPOSITORY, machine, print_table
from benchmarks.scripted_engine import STEP_MS, write_wrapper
from neaptide.commands.server_process import free_port

MODEL = "m"
CONTENT, GREETING = b'"content":"', b'"content":""'
LONG = 2_000
"""Tokens of an answer that does not end while tokens are measured."""
STEP_PER_STREAM_MS = 0.25
"""A step lasts so long for each stream, which loads a core to a third. An overloaded process merges tokens, and would
seem cheaper."""
LEAST_STEP_MS = 5.0
SHORT = 10
"""Tokens of an answer where arrivals are measured."""
CLOSED_STREAMS = 64
"""Chats in flight while the rate is measured that the server can answer."""
TTFT_SLO_S = 1.0
WARM_S = 1.0
"""The server takes the first second of an overload for a burst that ends."""
WARM_TOKENS = 3
COLUMNS = {
    "streams": "streams",
    "cpu_us_per_token": "CPU us/token",
    "tokens_per_cpu_s": "tokens/CPU s",
    "busy": "busy",
    "owner_us_per_token": "owner us/token",
    "fronts_us_per_token": "fronts us/token",
}
START_S = 90.0


@contextmanager
def server(checkout: Path, step_ms: float, *flags: str) -> Iterator[tuple[psutil.Process, tuple[str, int]]]:
    """A server of the checkout's code, and its address."""
    with tempfile.TemporaryDirectory() as directory:
        port, log_path = free_port(), Path(directory) / "server.log"
        environment = os.environ | {"PYTHONPATH": str(checkout), STEP_MS: str(step_ms)}
        command = [sys.executable, "-m", "neaptide", "serve", "--served-model-name", MODEL, "--port", str(port)]
        command += ["--data-dir", str(Path(directory) / "data"), "--engine-python", str(write_wrapper(Path(directory)))]
        command += ["--log-level", "warning", *flags]
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=log, stderr=log)
        try:
            address = ("127.0.0.1", port)
            _wait_until_ready(process, address, log_path)
            yield psutil.Process(process.pid), address
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", address: tuple[str, int], log_path: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            with socket.create_connection(address, 1.0) as peer:
                peer.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                if peer.recv(100).startswith(b"HTTP/1.1 200"):
                    return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"the server did not become ready:\n{log_path.read_text()[-2000:]}")


def request(max_tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "What is 21 + 34?"}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


@dataclass(slots=True)
class Exchange:
    """One request of a client; seconds of ``time.monotonic``."""

    sent_s: float
    status: int = 0
    first_s: float | None = None
    last_s: float | None = None
    num_tokens: int = 0
    server_ttft_s: float | None = None
    """As the reply's last chunk says."""
    refused_s: float | None = None
    """How long a refusal took."""
    has_retry_after: bool = False
    """Whether a refusal says when to try again."""
    is_last: bool = False
    """Whether the server ends the connection after it."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)


@dataclass(slots=True)
class Clients:
    """Streams on connections of their own."""

    address: tuple[str, int]
    ended: list[Exchange] = field(default_factory=list)
    num_tokens: int = 0
    num_bytes: int = 0
    num_reads: int = 0
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _current: dict[socket.socket, Exchange] = field(default_factory=dict)
    _tails: dict[socket.socket, bytes] = field(default_factory=dict)

    def open(self) -> socket.socket:
        peer = socket.create_connection(self.address)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(peer, selectors.EVENT_READ)
        return peer

    def send(self, peer: socket.socket, data: bytes) -> None:
        self._current[peer] = Exchange(time.monotonic())
        self._tails[peer] = b""
        peer.sendall(data)

    @property
    def num_running(self) -> int:
        return len(self._current)

    def read(self, timeout_s: float) -> list[socket.socket]:
        """Reads what has come; returns the connections whose replies have ended, for further requests."""
        done: list[socket.socket] = []
        for key, _ in self._selector.select(timeout_s):
            peer = key.fileobj
            assert isinstance(peer, socket.socket)
            try:
                data = peer.recv(65_536)
            except ConnectionError:
                data = b""
            if not data:
                self.drop(peer)
                continue
            self.num_bytes += len(data)
            self.num_reads += 1
            exchange = self._current.get(peer)
            if exchange is None or not self._take(peer, exchange, data):
                continue
            if exchange.is_last:
                self.drop(peer)
            else:
                self.ended.append(self._current.pop(peer))
                done.append(peer)
        return done

    def drop(self, peer: socket.socket) -> None:
        """Closes a connection, and ends what runs on it."""
        self._selector.unregister(peer)
        peer.close()
        exchange = self._current.pop(peer, None)
        if exchange is not None:
            self.ended.append(exchange)

    def _take(self, peer: socket.socket, exchange: Exchange, data: bytes) -> bool:
        now_s = time.monotonic()
        if not exchange.status:
            exchange.status = int(data[9:12])
        count = data.count(CONTENT) - data.count(GREETING)
        if count > 0:
            exchange.first_s = exchange.first_s or now_s
            exchange.last_s = now_s
            exchange.num_tokens += count
            self.num_tokens += count
        tail = self._tails[peer] + data
        if tail.endswith(b"\r\n0\r\n\r\n") or (exchange.status != 200 and b"\r\n\r\n" in tail and tail.endswith(b"}")):
            _, mark, rest = tail.rpartition(b'"time_to_first_token_ms":')
            if mark:
                exchange.server_ttft_s = float(rest[: rest.index(b",")]) / 1e3
            if exchange.status != 200:
                exchange.refused_s = now_s - exchange.sent_s
                exchange.has_retry_after = b"\r\nretry-after: " in tail.lower()
                exchange.is_last = b"\r\nconnection: close" in tail.lower()
            return True
        self._tails[peer] = tail[-1_000:]
        return False

    def read_until_all_run(self) -> None:
        """Reads until every running stream has had some tokens."""
        while any(exchange.num_tokens < WARM_TOKENS for exchange in self._current.values()):
            self.read(0.1)

    def close(self) -> None:
        for peer in [*self._current, *[key.fileobj for key in self._selector.get_map().values()]]:
            assert isinstance(peer, socket.socket)
            peer.close()
        self._selector.close()


class ServerVersion(NamedTuple):
    """A server that takes turns with others."""

    checkout: Path
    flags: tuple[str, ...] = ()


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def per_token(version: ServerVersion, num_streams: int, seconds: float) -> dict[str, float]:
    """Processor time for a token while so many streams run."""
    step_ms = max(LEAST_STEP_MS, STEP_PER_STREAM_MS * num_streams)
    # All streams start at once: under the usual TTFT target the later ones would be refused.
    patient = "--ttft-slo-ms", str(1e3 * START_S)
    with server(version.checkout, step_ms, *patient, *version.flags) as (process, address):
        fronts = _serving_fronts(process, version, address)
        clients = Clients(address)
        data = request(LONG)
        for peer in _at_fronts(clients, fronts, num_streams) or [clients.open() for _ in range(num_streams)]:
            clients.send(peer, data)
            clients.read(0.0)
        clients.read_until_all_run()
        began_s, began_cpu_s, fronts_cpu_s = time.monotonic(), cpu_s(process), sum(map(cpu_s, fronts))
        tokens, num_bytes, reads = clients.num_tokens, clients.num_bytes, clients.num_reads
        while time.monotonic() < began_s + seconds:
            clients.read(0.1)
        took_s, owner_cpu_s = time.monotonic() - began_s, cpu_s(process) - began_cpu_s
        fronts_cpu_s = sum(map(cpu_s, fronts)) - fronts_cpu_s
        took_cpu_s = owner_cpu_s + fronts_cpu_s
        tokens, num_bytes = clients.num_tokens - tokens, clients.num_bytes - num_bytes
        reads = clients.num_reads - reads
        if clients.num_running < num_streams:
            raise SystemExit(f"{num_streams - clients.num_running} streams ended early: {clients.ended[0]}")
        clients.close()
    return {
        "streams": num_streams,
        "step_ms": step_ms,
        "cpu_us_per_token": took_cpu_s / tokens * 1e6,
        "tokens_per_cpu_s": tokens / took_cpu_s,
        "tokens_per_s": tokens / took_s,
        "bytes_per_token": num_bytes / tokens,
        "reads_per_token": reads / tokens,
        "busy": took_cpu_s / took_s,
        "owner_us_per_token": owner_cpu_s / tokens * 1e6,
        "fronts_us_per_token": fronts_cpu_s / tokens * 1e6,
    }


def _serving_fronts(process: psutil.Process, version: ServerVersion, address: tuple[str, int]) -> list[psutil.Process]:
    """The further API processes, once each of them has accepted a connection."""
    if "--api-processes" not in version.flags:
        return []
    count = int(version.flags[version.flags.index("--api-processes") + 1]) - 1
    deadline_s = time.monotonic() + START_S
    with ExitStack() as opened:
        while time.monotonic() < deadline_s:
            opened.enter_context(socket.create_connection(address))
            time.sleep(0.05)
            fronts = [child for child in process.children() if "neaptide.launch.front" in child.cmdline()]
            if len(fronts) == count and all(client_ports(front, address) for front in fronts):
                return fronts
    raise SystemExit("the further API processes did not become ready")


def client_ports(process: psutil.Process, address: tuple[str, int]) -> set[int]:
    """Ports of the clients whose connections a process has accepted."""
    held = process.net_connections("tcp")
    return {one.raddr.port for one in held if one.laddr.port == address[1] and one.raddr}


def _at_fronts(clients: Clients, fronts: Sequence[psutil.Process], count: int) -> list[socket.socket]:
    """``count`` open connections to the front processes; empty if there are no front processes."""
    found: list[socket.socket] = []
    while fronts and len(found) < count:
        new = [clients.open() for _ in range(count)]
        time.sleep(0.5)  # until all are accepted
        ports = set[int]().union(*(client_ports(front, clients.address) for front in fronts))
        for peer in new:
            if peer.getsockname()[1] in ports and len(found) < count:
                found.append(peer)
            else:
                clients.drop(peer)
    return found


def answers_per_s(address: tuple[str, int], seconds: float) -> float:
    """Short chats that the server can answer in a second, with the next one sent as soon as one has ended."""
    clients, data = Clients(address), request(SHORT)
    for _ in range(CLOSED_STREAMS):
        clients.send(clients.open(), data)
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + seconds:
        for peer in clients.read(0.1):
            clients.send(peer, data)
    count = sum(exchange.status == 200 for exchange in clients.ended)
    clients.close()
    return count / seconds


def arrivals(address: tuple[str, int], per_s: float, seconds: float) -> list[Exchange]:
    """Short chats that arrive evenly whatever the server does, and what became of each."""
    clients, data, free = Clients(address), request(SHORT), list[socket.socket]()
    begun_s, sent = time.monotonic(), 0
    while (now_s := time.monotonic()) < begun_s + seconds or clients.num_running:
        if now_s > begun_s + seconds + START_S:
            break
        while sent < min(now_s - begun_s, seconds) * per_s:
            clients.send(free.pop() if free else clients.open(), data)
            sent += 1
        free += clients.read(0.001)
        free = [peer for peer in free if peer.fileno() >= 0]
    clients.close()
    return clients.ended


def at_load(version: ServerVersion, loads: Sequence[float], seconds: float) -> list[dict[str, float]]:
    """What becomes of chats that arrive at each fraction of the rate that the server can answer."""
    found = []
    with server(version.checkout, LEAST_STEP_MS, *version.flags) as (_, address):
        answers_per_s(address, 1.0)
        for load in loads:
            per_s = answers_per_s(address, seconds)  # anew: neighbours may have come
            ended = arrivals(address, load * per_s, seconds)
            begun_s = min(one.sent_s for one in ended)
            served = [one for one in ended if one.status == 200 and one.ttft_s is not None]
            refusals = [one for one in ended if one.status == 503]
            refused = [one.refused_s for one in refusals if one.refused_s is not None]
            seen = [one.ttft_s for one in served if one.ttft_s is not None]
            later = [one.ttft_s for one in served if one.ttft_s is not None and one.sent_s > begun_s + WARM_S]
            said = [one.server_ttft_s for one in served if one.server_ttft_s is not None]
            found.append(
                {
                    "load": load,
                    "per_s": load * per_s,
                    "served": len(served),
                    "refused": len(refused),
                    "others": len(ended) - len(served) - len(refused),
                    "served_of_ceiling": len(served) / (per_s * seconds),
                    "in_time": in_time(seen),
                    "in_time_later": in_time(later),
                    "ttft_p50_s": quantile(seen, 0.5),
                    "ttft_p99_s": quantile(seen, 0.99),
                    "server_ttft_p99_s": quantile(said, 0.99),
                    "refused_p50_s": quantile(refused, 0.5),
                    "refused_p99_s": quantile(refused, 0.99),
                    "retry_after": sum(one.has_retry_after for one in refusals) / max(len(refusals), 1),
                }
            )
    return found


def in_time(ttfts_s: Sequence[float]) -> float:
    """Share of the first tokens that came within the target; 0 without any."""
    return sum(one <= TTFT_SLO_S for one in ttfts_s) / max(len(ttfts_s), 1)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which the share of them lies; 0 without any."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def commit_of(checkout: Path) -> str:
    return subprocess.check_output(["git", "rev-parse", "--short=8", "HEAD"], cwd=checkout, text=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="10,500,2000", help="numbers of streams (10,500,2000)")
    parser.add_argument("--seconds", type=float, default=8.0, help="measured time of each run (8)")
    parser.add_argument("--turns", type=int, default=3, help="runs of each (3)")
    parser.add_argument(
        "--loads", default="0.5,1,2,4", help="arrivals by what can be answered; '' leaves it out (0.5,1,2,4)"
    )
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout, whose server takes turns")
    parser.add_argument("--other", metavar="FLAGS", help="flags of another server, which takes turns")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON here")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    versions = {"now": ServerVersion(REPOSITORY)}
    if args.before:
        versions["before"] = ServerVersion(args.before.resolve())
    if args.other:
        versions["other"] = ServerVersion(REPOSITORY, tuple(args.other.split()))
    found: dict[str, Any] = {
        "machine": machine(),
        "commits": {name: commit_of(version.checkout) for name, version in versions.items()},
    }
    rows: list[Sequence[object]] = []
    found["per_token"] = []
    for num_streams in map(int, filter(None, args.streams.split(","))):
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
        for _ in range(args.turns):
            for name, version in versions.items():
                runs[name].append(per_token(version, num_streams, args.seconds))
        for name, its_runs in runs.items():
            medians = {key: statistics.median(run[key] for run in its_runs) for key in its_runs[0]}
            found["per_token"].append({"version": name, **medians})
            rows.append([name, *(medians[key] for key in COLUMNS)])
    loads = [float(load) for load in args.loads.split(",") if load]
    loaded: list[Sequence[object]] = []
    found["at_load"] = []
    for name, version in versions.items() if loads else ():
        for run in at_load(version, loads, args.seconds):
            found["at_load"].append({"version": name, **run})
            loaded.append([name, *run.values()])
    found["machine_after"] = machine()
    print_table("API process", ["version", *COLUMNS.values()], rows)
    if loaded:
        columns = ("version", "load", "chats/s", "served", "refused", "others", "of ceiling", "in time", "after 1 s")
        times = ("TTFT p50 s", "p99 s", "p99 s as the server says", "refused p50 s", "p99 s", "Retry-After")
        print_table("Short chats", [*columns, *times], loaded)
    line = json.dumps(found)
    if args.out:
        args.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
