"""``neaptide batch`` against a real server on a real socket."""

import argparse
import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError

from neaptide.commands import batch
from neaptide.server.http.auth import AuthMiddleware, KeyRing
from neaptide.server.http.body_threads import BodyThreads
from neaptide.server.http.error_replies import install_handlers
from neaptide.server.routes.batches import batches_router
from neaptide.server.routes.files import files_router
from tests.patience import PATIENCE_S
from tests.server.batches.fakes import Server, jsonl, line, numbered
from tests.server.quotes.test_desk import desk_of


class Running:
    """A server in a thread of its own."""

    def __init__(self, data_dir: Path, keys: tuple[str, ...] = ()) -> None:
        self._data_dir = data_dir
        self._keys = KeyRing(keys)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),))

    def __enter__(self) -> "Running":
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    async def _serve(self) -> None:
        async with Server(self._data_dir) as server:
            self.parts = server
            server.engine.auto = True
            app = FastAPI(lifespan=self._lifespan)
            app.state.context = SimpleNamespace(bodies=BodyThreads())  # all that these routes want of it
            install_handlers(app, RequestValidationError)
            app.add_middleware(AuthMiddleware, keys=self._keys)
            desk = desk_of(server)
            app.include_router(files_router(server.service))
            app.include_router(batches_router(server.service, desk))
            self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, http="h11"))
            await self._server.serve(sockets=[self._socket])
            await desk.stop()

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI):  # type: ignore[no-untyped-def]
        self._ready.set()
        yield


@pytest.fixture(autouse=True)
def quick_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "POLL_S", 0.02)
    monkeypatch.delenv("NEAPTIDE_API_KEY", raising=False)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with Running(tmp_path / "data") as running:
        yield running


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    batch.add_parser(parser.add_subparsers(), "http://127.0.0.1:1")
    args = parser.parse_args(["batch", *argv])
    status: int = args.func(args)
    return status


def write(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "input.jsonl"
    path.write_bytes(content)
    return str(path)


def test_submit_wait_and_fetch(running: Running, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content = jsonl([line("a"), line("b"), line("hot", temperature=9)])
    url = ("--base-url", running.base_url)
    assert run("submit", write(tmp_path, content), "--wait", *url) == 0
    out, err = capfd.readouterr()
    batch_id = out.strip()
    assert batch_id.startswith("batch_")
    assert err.splitlines()[-2:] == [
        "completed 3/3 (1 failed)",
        f"Some lines failed; see why with: neaptide batch results {batch_id} --errors",
    ]
    target = tmp_path / "out.jsonl"
    assert run("results", batch_id, "-o", str(target), *url) == 0
    assert [json.loads(entry)["custom_id"] for entry in target.read_text().splitlines()] == ["a", "b"]
    assert capfd.readouterr().err == "completed: 2 completed, 1 failed\n"
    assert run("results", batch_id, "--errors", *url) == 0
    assert json.loads(capfd.readouterr().out)["custom_id"] == "hot"
    assert run("watch", batch_id, *url) == 0
    assert run("cancel", batch_id, *url) == 1
    assert "Cannot cancel a batch with status 'completed'. (HTTP 409)" in capfd.readouterr().err


def test_a_file_is_quoted_and_nothing_stays_of_it(
    running: Running, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A new token of a prompt takes a second. What is shared is measured in bytes of JSON, which makes it 85 of 88."""
    url = ("--server", running.base_url)
    path = write(tmp_path, jsonl(line(f"c{k}", f"the same for all lines{k}") for k in range(5)))
    assert run("quote", path, *url) == 0
    sentence, size, needs, _, heading, *windows = capfd.readouterr().out.splitlines()
    assert sentence.startswith("Done in ")
    assert sentence.endswith(" in nine of ten.")
    assert size.startswith("5 lines: 115 prompt tokens, 74% of them in shared prefixes")
    assert needs == "It needs 30 s of the device; shared prefixes save 85 s."
    assert heading.split() == ["window", "half", "of", "the", "cases", "nine", "of", "ten", "in", "time?"]
    assert [(row.split()[0], row.split()[-1]) for row in windows[:3]] == [("1h", "yes"), ("6h", "yes"), ("24h", "yes")]
    assert listed(running, capfd) == []
    assert httpx.get(f"{running.base_url}/v1/files", trust_env=False).json()["data"] == []


def test_an_uploaded_file_is_quoted_by_its_id_and_stays(
    running: Running, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = ("--server", running.base_url)
    with httpx.Client(base_url=running.base_url, trust_env=False) as client:
        files = {"file": ("input.jsonl", numbered(3))}
        file_id = client.post("/v1/files", files=files, data={"purpose": "batch"}).raise_for_status().json()["id"]
        assert run("quote", file_id, "--json", *url) == 0
        quote = json.loads(capfd.readouterr().out)
        assert (quote["object"], quote["lines"]) == ("batch.quote", 3)
        assert client.get(f"/v1/files/{file_id}").status_code == 200


def test_a_quote_that_no_window_holds_says_what_is_missing(
    running: Running, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """200,000 s of the device."""
    path = write(tmp_path, jsonl([line("long", "x" * 200_000)]))
    assert run("quote", path, "--server", running.base_url) == 1
    shown = capfd.readouterr().out
    assert shown.startswith("It cannot be foreseen to be done within 2 days. It needs ")
    assert "1h: It needs 2.3 days of the device; chats leave at most 60 min in 60 min." in shown.splitlines()


def test_a_batch_is_submitted_if_its_quote_is_soon_enough(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now_s = running.parts.clock.now_s
    monkeypatch.setattr(batch, "time", SimpleNamespace(time=lambda: now_s, sleep=time.sleep))
    url = ("--server", running.base_url)
    path = write(tmp_path, jsonl([line("c", "x" * 4000)]))
    assert run("submit", path, "--accept-by", "1h", *url) == 1
    assert "The batch cannot be promised by then. It needs 67 min of the device" in capfd.readouterr().err
    assert listed(running, capfd) == []
    assert run("submit", path, "--accept-by", "2h", *url) == 0
    batch_id = capfd.readouterr().out.strip()
    with httpx.Client(base_url=running.base_url, trust_env=False) as client:
        due_at = client.get(f"/v1/batches/{batch_id}").json()["neaptide"]["due_at"]
    assert now_s + 4000 <= due_at <= now_s + 7200


def test_a_receipt_is_shown_saved_and_checked(
    running: Running, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = ("--server", running.base_url)
    running.parts.engine.row_s = 30.0
    assert run("submit", write(tmp_path, numbered(4)), "--wait", *url) == 0
    batch_id = capfd.readouterr().out.strip()
    assert run("receipt", batch_id, *url) == 0
    first, *table = capfd.readouterr().out.splitlines()
    assert first == "completed in 0 ms: 4 of 4 lines, 2 min of the device."
    rows = dict(row.rsplit(maxsplit=1) for row in table if row)
    assert (rows["answer tokens"], rows["device seconds, its share"]) == ("40", "120.000")
    assert run("receipt", batch_id, "--json", *url) == 0
    saved = tmp_path / "receipt.json"
    saved.write_text(capfd.readouterr().out)
    assert run("receipt", "--check", str(saved), *url) == 0
    assert capfd.readouterr().out == "confirmed: the server has made this receipt\n"
    saved.write_text(saved.read_text().replace('"completed": 4', '"completed": 3'))
    assert run("receipt", "--check", str(saved), *url) == 1
    assert capfd.readouterr().out == "not confirmed: it has been changed\n"
    saved.write_text("{")
    for wrong, said in (
        (("--check", str(saved)), "is not JSON"),
        ((), "give either the id"),
        ((batch_id, "--check", str(saved)), "give either the id"),
        (("batch_none",), "No batch found with this id. (HTTP 404)"),
    ):
        assert run("receipt", *wrong, *url) == 1
        assert said in capfd.readouterr().err


def listed(running: Running, capfd: pytest.CaptureFixture[str]) -> list[str]:
    assert run("list", "--json", "--server", running.base_url) == 0
    return capfd.readouterr().out.splitlines()


def test_a_bad_file_is_one_clear_error(running: Running, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url = ("--base-url", running.base_url)
    assert run("submit", write(tmp_path, b"{}\noops\n"), "--wait", *url) == 1
    err = capfd.readouterr().err
    assert "line 1: Missing required parameter: 'custom_id'. (missing_required_parameter)" in err
    assert "line 2: This line is not parseable" in err
    assert "neaptide batch: batch rejected: no line was run." in err
    (failed,) = (json.loads(entry)["id"] for entry in listed(running, capfd))
    assert run("results", failed, *url) == 1
    said = capfd.readouterr().err.splitlines()
    assert said[0].startswith("  line 1: Missing required parameter: 'custom_id'.")
    assert said[-1] == "failed: 0 completed, 0 failed; there is no output file"
    for flag in ("--window", "--completion-window"):
        assert run("submit", write(tmp_path, numbered(1)), flag, "48h", *url) == 1
        assert "Supported values are" in capfd.readouterr().err
    assert run("submit", str(tmp_path / "missing.jsonl"), *url) == 1
    assert "missing.jsonl: No such file" in capfd.readouterr().err
    assert run("watch", "batch_unknown", *url) == 1
    assert capfd.readouterr().err.endswith("(HTTP 404); list batches with: neaptide batch list\n")


def test_cancel(running: Running, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url = ("--base-url", running.base_url)
    running.parts.engine.auto = False
    assert run("submit", write(tmp_path, numbered(2)), *url) == 0
    batch_id = capfd.readouterr().out.strip()
    assert run("results", batch_id, *url) == 1
    assert run("cancel", batch_id, *url) == 0
    assert capfd.readouterr().out.startswith(f"{batch_id}: cancel")
    assert run("watch", batch_id, *url) == 1
    watched = capfd.readouterr().err
    assert "cancelled 0/2\n" in watched
    assert watched.endswith("the batch is cancelled: 0 of 2 lines completed, 0 failed, 2 did not run\n")
    assert run("results", batch_id, *url) == 1
    assert capfd.readouterr().err.endswith("there is no output file\n")


def test_who_stops_watching_is_told_that_the_batch_goes_on_and_nobody_else(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    path, url = write(tmp_path, numbered(1)), ("--base-url", running.base_url)
    running.parts.engine.auto = False
    monkeypatch.setattr(batch, "_next", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run("submit", path, "--wait", *url)
    out, err = capfd.readouterr()
    assert err.endswith(f"neaptide batch: the batch continues; watch it with: neaptide batch watch {out.strip()}\n")
    monkeypatch.setattr(batch, "call", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run("submit", path, "--wait", *url)
    assert capfd.readouterr().err == ""


def test_a_server_that_is_none_of_openais_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    page = httpx.MockTransport(lambda request: httpx.Response(200, html="<title>Log in</title>"))
    with httpx.Client(base_url="http://proxy", transport=page) as client, pytest.raises(batch.CommandError) as said:
        batch.call(client, "GET", "/v1/batches")
    assert str(said.value) == "http://proxy/v1/batches does not answer like an OpenAI server: the answer is not JSON"


def test_no_server(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("watch", "batch_x", "--base-url", "http://127.0.0.1:9") == 1
    err = capfd.readouterr().err
    assert err.startswith("neaptide batch: cannot reach a server at http://127.0.0.1:9")
    assert len(err.splitlines()) == 1


def test_progress_bar_on_a_terminal(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run("submit", write(tmp_path, numbered(3)), "--wait", "--base-url", running.base_url) == 0
    assert "3/3" in capfd.readouterr().err


def submit(running: Running, tmp_path: Path, capfd: pytest.CaptureFixture[str], count: int) -> list[str]:
    """Ids of so many batches, the newest first."""
    path = write(tmp_path, numbered(1))
    for _ in range(count):
        assert run("submit", path, "--base-url", running.base_url) == 0
    return capfd.readouterr().out.split()[::-1]


def test_list(running: Running, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url = ("--base-url", running.base_url)
    content = jsonl([line("a"), line("hot", temperature=9)])
    assert run("submit", write(tmp_path, content), "--wait", *url) == 0
    first = capfd.readouterr().out.strip()
    running.parts.engine.auto = False
    (second,) = submit(running, tmp_path, capfd, 1)
    assert run("list", *url) == 0
    newer, older = capfd.readouterr().out.splitlines()
    assert newer.startswith(f"{second}  2027-01-15 08:00:00Z  ")
    assert older == f"{first}  2027-01-15 08:00:00Z  completed    2/2 (1 failed)"


def test_the_list_says_why_a_batch_failed_and_that_it_is_empty(
    running: Running, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = ("--base-url", running.base_url)
    assert run("list", *url) == 0
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "no batches (with API keys, each key sees its own)\n")
    assert run("submit", write(tmp_path, b"{}\n"), "--wait", *url) == 1
    capfd.readouterr()
    assert run("list", *url) == 0
    assert capfd.readouterr().out.endswith(
        "  failed       0/0  line 1: Missing required parameter: 'custom_id'. (missing_required_parameter)\n"
    )


def test_a_long_list_is_fetched_page_by_page(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch, "PAGE", 2)
    ids = submit(running, tmp_path, capfd, 5)
    for limit, wanted in (("20", ids), ("3", ids[:3])):
        assert run("list", "--limit", limit, "--json", "--base-url", running.base_url) == 0
        assert [json.loads(entry)["id"] for entry in capfd.readouterr().out.splitlines()] == wanted


@pytest.mark.parametrize("suffix", ["/v1", "/v1/", "/", ""])
def test_the_servers_address_with_and_without_v1(
    running: Running, capfd: pytest.CaptureFixture[str], suffix: str
) -> None:
    assert run("list", "--base-url", running.base_url + suffix) == 0


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_server_on_this_machine_is_never_reached_by_a_proxy(
    variable: str, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:9")  # no server has this port
    assert run("list", "--base-url", running.base_url) == 0


def test_where_the_key_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("alpha\n")
    with Running(tmp_path / "data", keys=("alpha:flex", "beta")) as running:
        url = ("--base-url", running.base_url)
        assert run("list", *url) == 1
        assert "(HTTP 401)" in capfd.readouterr().err
        assert run("list", *url, "--api-key", "beta") == 0
        assert run("list", *url, "--api-key-file", str(tmp_path / "key")) == 0
        monkeypatch.setenv("NEAPTIDE_API_KEY", "alpha:flex,beta")
        assert run("list", *url) == 0
        assert run("list", *url, "--api-key", "wrong") == 1


@pytest.mark.parametrize("content", ["", "a\nb\n", "schlüssel"])
def test_a_file_that_is_no_key_is_one_clear_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "key").write_text(content)
    assert run("list", "--api-key-file", str(tmp_path / "key")) == 1
    assert capfd.readouterr().err == (
        f"neaptide batch: {tmp_path / 'key'}: there must be one key, in printable ASCII characters\n"
    )
    assert run("list", "--api-key-file", str(tmp_path / "none")) == 1
    assert capfd.readouterr().err == f"neaptide batch: {tmp_path / 'none'}: No such file or directory\n"
