"""``neaptide loadgen``: sends recorded or synthetic load to any OpenAI-compatible server over HTTP, and writes a
report."""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import httpx
from rich import box
from rich.console import Console
from rich.table import Table

from neaptide.commands.loadgen.flags import add_common, add_synth, add_trace, how_of, shots_of
from neaptide.commands.loadgen.view import RunView
from neaptide.commands.outputs import add_server, check_writable, print_json, write_json
from neaptide.loadgen.client.batches import BatchClientError
from neaptide.loadgen.client.proxies import mounts_for
from neaptide.loadgen.report.page import ROWS, cell_text, report
from neaptide.loadgen.report.records import record_lines
from neaptide.loadgen.report.summary import COMPARED, Summary, ratios, summary
from neaptide.loadgen.run.load import Shot
from neaptide.loadgen.run.runner import TIMEOUT_S, How, Progress, RunError, StoppedError, run
from neaptide.server.client_variables import client_api_key, sendable

Runs = dict[str, tuple[Progress, Summary]]
TERMINATED = 143
"""The exit status that shells give to a command ended by SIGTERM."""
CLIENT_BEHIND_MS = 20.0
"""Lateness at p99 above which the client is too slow to measure with."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", base_url: str) -> None:
    parser = subparsers.add_parser("loadgen", help="send recorded or synthetic load to a running server, with a report")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    replay = actions.add_parser("replay", help="send a recorded trace")
    add_trace(replay, required=True)
    synth = actions.add_parser("synth", help="send synthetic load")
    add_synth(synth)
    compare = actions.add_parser("compare", help="send the same load to several servers in turn")
    add_trace(compare, required=False)
    add_synth(compare)
    server_help = "a server and its name in the report; ratios are relative to the first"
    compare.add_argument("--server", action="append", required=True, metavar="NAME=URL", help=server_help)
    for one in (replay, synth):
        add_server(one, base_url)
    for one, default in ((replay, {}), (synth, {"trace": None}), (compare, {})):
        add_common(one)
        one.set_defaults(func=run_command, **default)


def run_command(args: argparse.Namespace) -> int:
    """Returns 0, 1 if a server could not be tested or answered no request, 2 if the command is invalid, or 143 after
    SIGTERM."""
    try:
        servers = _servers(args.server)
        headers = _headers(args.api_key)
        shots, how = shots_of(args), how_of(args)
        for path in (args.html, args.json, args.records):
            if path is not None:
                check_writable(path)
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}", 2)
    except ValueError as error:
        return _refuse(str(error), 2)
    if len(set(servers.values())) < len(servers):
        _note("both names are one server: the second run finds the first run's prompts in the prefix cache")
    stopped: list[int] = []
    try:
        runs = asyncio.run(_run_all(servers, headers, shots, how, args.warm_up_s, stopped))
    except (RunError, BatchClientError) as error:
        return _refuse(str(error), 1)
    try:
        status = _write(runs, args) if runs else 1
    except BrokenPipeError:
        raise
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}", 1)
    if signal.SIGTERM in stopped:
        return TERMINATED
    if stopped:
        raise KeyboardInterrupt
    return status


def _servers(given: str | Sequence[str]) -> dict[str, str]:
    """URLs by name. Raises ValueError."""
    if isinstance(given, str):
        url = _url(given)
        return {urlsplit(url).netloc: url}
    named: dict[str, str] = {}
    for text in given:
        name, equals, url = text.partition("=")
        if not equals or not name:
            raise ValueError(f"--server must be NAME=URL, not {text!r}")
        if name in named:
            raise ValueError(f"two servers are called {name!r}")
        named[name] = _url(url)
    if len(named) < 2:
        raise ValueError("compare needs at least two servers: --server A=URL --server B=URL")
    return named


def _url(text: str) -> str:
    # OpenAI clients need /v1 in the URL; ours accepts it.
    url = text.rstrip("/").removesuffix("/v1")
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ValueError(f"{text!r} is not a server URL such as http://127.0.0.1:8000")
    return url


def _headers(given: str | None) -> dict[str, str]:
    """Headers with the key of the flag or the environment. Raises ValueError."""
    key = given or client_api_key()
    if key is None:
        return {}
    return {"Authorization": f"Bearer {sendable(key, '--api-key' if given else 'NEAPTIDE_API_KEY')}"}


async def _run_all(
    servers: Mapping[str, str],
    headers: dict[str, str],
    shots: Sequence[Shot],
    how: How,
    warm_up_s: float,
    stopped: list[int],
) -> Runs:
    """Runs the load on one server after the other. The first Ctrl-C or SIGTERM ends it with what has ended so far, and
    is noted in ``stopped``. The second ends it at once."""
    runs: Runs = {}
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def end(number: int) -> None:
        loop.remove_signal_handler(number)
        stopped.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    for name, url in servers.items():
        view = RunView(Console(stderr=True), name)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=url, headers=headers, timeout=TIMEOUT_S, limits=limits, mounts=mounts_for(url)
        ) as http:
            with view.shown, contextlib.suppress(StoppedError):
                progress = await run(http, shots, how, view.update, stop)
                runs[name] = (progress, summary(progress, warm_up_s))
                _warn(name, *runs[name])
        if stop.is_set():
            break
    return runs


def _write(runs: Runs, args: argparse.Namespace) -> int:
    settings = _settings(args)
    first = next(iter(runs))
    found: dict[str, Any] = {"settings": settings, "servers": {name: figures for name, (_, figures) in runs.items()}}
    if len(runs) > 1:
        found["ratios"] = {name: ratios(runs[first][1], figures) for name, (_, figures) in runs.items()}
    title = f"neaptide loadgen, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    if _was_stopped(runs):
        found["partial"] = True
        title += ", partial: stopped"
    args.html.write_text(report(runs, settings, title, found.get("ratios")), encoding="utf-8")
    line = json.dumps(found, allow_nan=False)
    write_json(line, args.json)
    if args.records is not None:
        lines = record_lines({name: progress for name, (progress, _) in runs.items()})
        args.records.write_text(lines, encoding="utf-8")
    console = Console(width=1000)
    console.print(_table(runs), highlight=False)
    if len(runs) > 1:
        console.print(_ratios(found["ratios"], first), highlight=False)
    print(f"report: {args.html}")
    print_json(line, args.json)
    return 0 if all(figures["failed"] < figures["requests"] for _, figures in runs.values()) else 1


def _was_stopped(runs: Runs) -> bool:
    return any(progress.was_stopped for progress, _ in runs.values())


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """All arguments but the key and the output files."""
    hidden = {"func", "api_key", "html", "json", "records"}
    return {name: value if value is None else _plain(value) for name, value in vars(args).items() if name not in hidden}


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | list) else str(value)


def _table(runs: Runs) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    for label, path in ROWS:
        table.add_row(label, *(cell_text(label, figures, path) for _, figures in runs.values()))
    return table


def _ratios(found: Mapping[str, Mapping[str, float | None]], first: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"over {first}", title_justify="left")
    table.add_column("")
    others = [name for name in found if name != first]
    for name in others:
        table.add_column(name, justify="right")
    for figure in COMPARED:
        values = [found[name][figure] for name in others]
        table.add_row(figure, *("-" if value is None else f"{value:.3f}" for value in values))
    return table


def _warn(name: str, progress: Progress, figures: Summary) -> None:
    notes = []
    if progress.was_stopped:
        num_ended, num_shots = len(progress.records), len(progress.shots)
        notes.append(f"stopped: the results are partial, of {num_ended} of {num_shots} requests")
    if (late_ms := figures["late_ms"]["p99"] or 0.0) > CLIENT_BEHIND_MS:
        notes.append(
            f"1% of the requests were sent more than {late_ms:.0f} ms late: the load generator fell behind, so "
            "results are too pessimistic; use a faster or idle client machine"
        )
    if not progress.wording.exact:
        notes.append("the server does not report its token counts: prompt lengths are approximate")
    if figures["failed"]:
        notes.append(f"{figures['failed']} of {figures['requests']} requests failed: {next(iter(figures['errors']))}")
    batch = progress.watch.batch
    if batch is not None and batch["status"] == "completed":
        notes.append("the batch ended before the load did: later requests ran without it")
    for note in notes:
        _note(f"{name}: {note}")


def _note(message: str) -> None:
    print(f"neaptide loadgen: {message}", file=sys.stderr)


def _refuse(message: str, status: int) -> int:
    _note(message)
    return status
