"""``neaptide batch``: submit, list, watch, cancel batches on a running server, download results, show receipts."""

import argparse
import json
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from neaptide.commands.client import CommandError, add_client, call, error_text, run_client
from neaptide.commands.quotes import quote_lines
from neaptide.commands.receipts import receipt_lines
from neaptide.durations import window_seconds
from neaptide.loadgen.client.batches import TERMINAL, errors_of

POLL_S = 1.0
SHOWN_ERRORS = 10
PAGE = 100
"""The API's largest page size."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", base_url: str) -> None:
    """Adds the ``batch`` command; ``base_url`` is the default server."""
    parser = subparsers.add_parser("batch", help="submit, watch and fetch batches on a running server")
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    def action(name: str, help_text: str, run: Callable[[httpx.Client, argparse.Namespace], int]) -> Any:
        sub = actions.add_parser(name, help=help_text)
        add_client(sub, base_url)
        sub.set_defaults(func=lambda args: run_client("batch", run, args))
        return sub

    submit = action("submit", "upload a JSONL file and start a batch on it", _submit)
    submit.add_argument("file", metavar="FILE", type=Path, help="one request per line, as in OpenAI's Batch API")
    submit.add_argument(
        "--endpoint", default="/v1/chat/completions", help="API endpoint of every line (/v1/chat/completions)"
    )
    submit.add_argument(
        *("--window", "--completion-window"), default="24h", help="the batch expires after this time (24h)"
    )
    submit.add_argument("--wait", action="store_true", help="watch the batch until it ends")
    submit.add_argument(
        "--accept-by",
        metavar="TIME",
        type=_duration,
        help="start it only if nine of ten such batches are done in this time, such as 6h; its deadline is then the "
        "quoted time",
    )
    quote = action("quote", "say when a batch would end that is submitted now; nothing is started", _quote)
    quote.add_argument("file", metavar="FILE", help="a JSONL file, or the id of an uploaded one")
    quote.add_argument("--json", action="store_true", help="print the quote as one line of JSON")
    receipt = action("receipt", "show what an ended batch has cost, and what its time went to", _receipt)
    receipt.add_argument("id", metavar="ID", nargs="?", help="batch id")
    receipt.add_argument("--json", action="store_true", help="print the receipt as one line of JSON")
    receipt.add_argument(
        "--check",
        metavar="FILE",
        type=Path,
        help="ask the server whether it has made the receipt in this JSON file; exit status 1 if not",
    )
    listing = action("list", "show batches, the newest first", _list)
    listing.add_argument("--limit", type=_limit, default=20, metavar="N", help="show at most this many (20)")
    listing.add_argument("--json", action="store_true", help="print each as one line of JSON")
    watch = action("watch", "show a batch's progress until it ends", _watch)
    cancel = action("cancel", "stop a batch; finished results are kept", _cancel)
    results = action("results", "download the output file of a finished batch", _results)
    for sub in (watch, cancel, results):
        sub.add_argument("id", metavar="ID", help="batch id")
    results.add_argument(
        "-o", "--output", metavar="OUT", type=Path, help="write to this file instead of standard output"
    )
    results.add_argument("--errors", action="store_true", help="download the error file instead")


def _limit(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of batches")
    return int(text)


def _duration(text: str) -> int:
    try:
        return window_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# ---- actions --------------------------------------------------------------------------------------------


def _submit(client: httpx.Client, args: argparse.Namespace) -> int:
    key = uuid.uuid4().hex
    file = _upload(client, args.file, key)
    body = {"input_file_id": file["id"], "endpoint": args.endpoint, "completion_window": args.window}
    if args.accept_by is not None:
        body["accept_by"] = int(time.time()) + args.accept_by
    batch = call(client, "POST", "/v1/batches", json=body, headers={"Idempotency-Key": key})
    print(batch["id"], flush=True)
    return _follow(client, batch) if args.wait else 0


def _upload(client: httpx.Client, path: Path, key: str) -> dict[str, Any]:
    with path.open("rb") as f:
        return call(
            client,
            "POST",
            "/v1/files",
            files={"file": (path.name, f, "application/jsonl")},
            data={"purpose": "batch"},
            headers={"Idempotency-Key": key},
        )


def _quote(client: httpx.Client, args: argparse.Namespace) -> int:
    """Returns 1 where the batch ends in none of the windows in nine of ten cases."""
    is_uploaded = args.file.startswith("file-") and not Path(args.file).exists()
    file_id = args.file if is_uploaded else _upload(client, Path(args.file), uuid.uuid4().hex)["id"]
    try:
        quote = call(client, "POST", "/v1/batches/quote", json={"input_file_id": file_id})
    finally:
        if not is_uploaded:
            call(client, "DELETE", f"/v1/files/{file_id}")
    print(json.dumps(quote) if args.json else "\n".join(quote_lines(quote)))
    return 0 if any(window["outlook"] == "on_time" for window in quote["windows"]) else 1


def _receipt(client: httpx.Client, args: argparse.Namespace) -> int:
    """Returns 1 where the server does not confirm the receipt to check."""
    if (args.id is None) == (args.check is None):
        raise CommandError("give either the id of a batch or --check FILE")
    if args.check is not None:
        return _check_receipt(client, args)
    receipt = call(client, "GET", f"/v1/batches/{args.id}/receipt")
    print(json.dumps(receipt) if args.json else "\n".join(receipt_lines(receipt)))
    return 0


def _check_receipt(client: httpx.Client, args: argparse.Namespace) -> int:
    try:
        receipt = json.loads(args.check.read_bytes())
    except ValueError:
        raise CommandError(f"{args.check} is not JSON; save a receipt with --json") from None
    found = call(client, "POST", "/v1/batches/check_receipt", json=receipt)
    said = "confirmed: the server has made this receipt" if found["confirmed"] else "not confirmed: it has been changed"
    print(json.dumps(found) if args.json else said)
    return 0 if found["confirmed"] else 1


def _list(client: httpx.Client, args: argparse.Namespace) -> int:
    left: int = args.limit
    after: str | None = None
    is_empty = True
    while left:
        params: dict[str, str | int] = {"limit": min(left, PAGE)} | ({} if after is None else {"after": after})
        page = call(client, "GET", "/v1/batches", params=params)
        for batch in page["data"]:
            print(json.dumps(batch) if args.json else _row(batch))
            is_empty = False
        left -= len(page["data"])
        after = page["last_id"]
        if not page["has_more"]:
            break
    if is_empty and not args.json:
        print("no batches (with API keys, each key sees its own)", file=sys.stderr)
    return 0


def _row(batch: dict[str, Any]) -> str:
    counts = batch["request_counts"]
    done = f"{counts['completed'] + counts['failed']}/{counts['total']}"
    failed = f" ({counts['failed']} failed)" if counts["failed"] else ""
    created = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(batch["created_at"]))
    why = f"  {errors_of(batch)[0]}" if batch["errors"] else ""
    return f"{batch['id']}  {created}  {batch['status']:<11}  {done}{failed}{why}"


def _watch(client: httpx.Client, args: argparse.Namespace) -> int:
    return _follow(client, call(client, "GET", f"/v1/batches/{args.id}"))


def _cancel(client: httpx.Client, args: argparse.Namespace) -> int:
    batch = call(client, "POST", f"/v1/batches/{args.id}/cancel")
    print(f"{batch['id']}: {batch['status']}")
    return 0


def _results(client: httpx.Client, args: argparse.Namespace) -> int:
    """Returns 1 where there is no output file to write."""
    batch = call(client, "GET", f"/v1/batches/{args.id}")
    if batch["status"] not in TERMINAL:
        raise CommandError(f"the batch is {batch['status']}; its files are available once it has ended")
    file_id = batch["error_file_id" if args.errors else "output_file_id"]
    if file_id is not None:
        _download(client, file_id, args.output)
    for said in errors_of(batch, SHOWN_ERRORS):
        print(f"  {said}", file=sys.stderr)
    counts = batch["request_counts"]
    kind = "error" if args.errors else "output"
    note = f"{counts['completed']} completed, {counts['failed']} failed"
    print(f"{batch['status']}: {note}" + ("" if file_id else f"; there is no {kind} file"), file=sys.stderr)
    return 0 if file_id is not None or args.errors else 1


def _download(client: httpx.Client, file_id: str, target: Path | None) -> None:
    with client.stream("GET", f"/v1/files/{file_id}/content") as response:
        if not response.is_success:
            response.read()
            raise CommandError(error_text(response))
        if target is None:
            _copy(response, sys.stdout.buffer)
            return
        # Under its final name only when complete.
        part = target.with_name(f"{target.name}.part")
        with part.open("wb") as f:
            _copy(response, f)
        part.replace(target)


def _copy(response: httpx.Response, out: BinaryIO) -> None:
    for chunk in response.iter_bytes(1 << 16):
        out.write(chunk)
    out.flush()


# ---- watching -------------------------------------------------------------------------------------------


def _follow(client: httpx.Client, batch: dict[str, Any]) -> int:
    """Shows progress until the batch ends. Returns 0 if it was completed."""
    console = Console(stderr=True)
    try:
        batch = (_follow_bar if console.is_terminal else _follow_lines)(client, batch, console)
    except KeyboardInterrupt:
        print(
            f"neaptide batch: the batch continues; watch it with: neaptide batch watch {batch['id']}", file=sys.stderr
        )
        raise
    if batch["status"] != "completed":
        for said in errors_of(batch, SHOWN_ERRORS):
            print(f"  {said}", file=sys.stderr)
        raise CommandError(_unsuccessful(batch))
    if failed := batch["request_counts"]["failed"]:
        whole = "All lines" if failed == batch["request_counts"]["total"] else "Some lines"
        print(f"{whole} failed; see why with: neaptide batch results {batch['id']} --errors", file=sys.stderr)
    return 0


def _unsuccessful(batch: dict[str, Any]) -> str:
    counts = batch["request_counts"]
    if batch["status"] == "failed" and not counts["total"]:
        return "batch rejected: no line was run. Fix these lines and submit again"
    not_run = counts["total"] - counts["completed"] - counts["failed"]
    said = f"the batch is {batch['status']}: {counts['completed']} of {counts['total']} lines completed"
    return f"{said}, {counts['failed']} failed" + (f", {not_run} did not run" if not_run else "")


def _next(client: httpx.Client, batch: dict[str, Any]) -> dict[str, Any]:
    time.sleep(POLL_S)
    return call(client, "GET", f"/v1/batches/{batch['id']}")


def _follow_lines(client: httpx.Client, batch: dict[str, Any], console: Console) -> dict[str, Any]:
    shown = ""
    while True:
        counts = batch["request_counts"]
        text = f"{batch['status']} {counts['completed'] + counts['failed']}/{counts['total']}"
        text += f" ({counts['failed']} failed)" if counts["failed"] else ""
        if text != shown:
            print(text, file=sys.stderr, flush=True)
            shown = text
        if batch["status"] in TERMINAL:
            return batch
        batch = _next(client, batch)


def _follow_bar(client: httpx.Client, batch: dict[str, Any], console: Console) -> dict[str, Any]:
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(batch["status"], total=None)
        while True:
            counts = batch["request_counts"]
            total, done = counts["total"] or None, counts["completed"] + counts["failed"]
            progress.update(task, description=batch["status"], total=total, completed=done)
            if batch["status"] in TERMINAL:
                return batch
            batch = _next(client, batch)
