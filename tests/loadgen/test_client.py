"""The streaming client against servers that say anything, over real sockets."""

import ast
import asyncio
import json
import re
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

import neaptide
from neaptide.loadgen.client.client import StreamClient, _proxy_of
from neaptide.loadgen.client.proxies import blocking_mounts_for, mounts_for
from neaptide.loadgen.client.recorder import ChatRecord
from tests.loadgen.scripted import HEAD, Answer, chunked, plain, scripted, stream
from tests.patience import PATIENCE_S, until

MESSAGES = [{"role": "user", "content": "hi"}]
CERTIFICATE = Path(__file__).parent / "localhost.pem"


def event(text: str, finish: str | None = None, **more: Any) -> bytes:
    choice = {"delta": {"content": text}, "finish_reason": finish} | more
    return b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"


ONE, TWO, DONE = event("oné\u2028"), event("two", "stop"), b"data: [DONE]\n\n"
WHOLE = ONE + TWO + DONE


async def asked(answer: Answer, cancel_after_s: float | None = None, timeout_s: float = PATIENCE_S) -> ChatRecord:
    async with scripted(answer) as server, StreamClient(server.url, "m", timeout_s=timeout_s) as client:
        return await client.chat(MESSAGES, 8, cancel_after_s=cancel_after_s)


# ---- what is read ----


@pytest.mark.parametrize(
    "pieces",
    [
        [WHOLE],
        [ONE, TWO, DONE],
        [ONE + TWO[:9], TWO[9:] + DONE],
        [WHOLE[k : k + 1] for k in range(len(WHOLE))],  # characters, too, come in two pieces
        [ONE, TWO + DONE[:9], DONE[9:]],
        [ONE + TWO, DONE[:-2]],
        [WHOLE[:-2].removesuffix(b"\n\n" + DONE[:-2])],  # the last event has no end
        [WHOLE.replace(b"\n", b"\r\n")],
        [WHOLE.replace(b"\n", b"\r\n")[k : k + 7] for k in range(0, len(WHOLE) + 6, 7)],
        [b": ping\n\n", ONE, b": ping\n\nevent: message\nid: 1\n", TWO, b": data: {\n\n", DONE],
        [WHOLE.replace(b"\n\n", b"\n")],
        [WHOLE.replace(b"data: ", b"data:")],
    ],
    ids=str,
)
async def test_a_stream_may_come_in_any_pieces(pieces: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.loadgen.scripted.PAUSE_S", 0.0 if len(pieces) > 50 else 0.01)
    record = await asked(stream(pieces))
    found = (record.text, len(record.token_times_s), record.finish_reason, record.error, record.cancelled)
    assert found == ("oné\u2028two", 2, "stop", None, False)


@pytest.mark.parametrize("piece_bytes", [1 << 30, 500_000])
async def test_lines_may_be_long(piece_bytes: int) -> None:
    content = event("a") + event("b", "stop", logprobs={"content": "x" * 3_000_000}) + event("c") + DONE
    record = await asked(stream([content[k : k + piece_bytes] for k in range(0, len(content), piece_bytes)]))
    assert (record.text, record.error) == ("abc", None)


async def test_what_json_does_not_have_does_no_harm() -> None:
    broken = event("a?", "stop").replace(b"?", b"\xff\xc3")
    number = event("b", logprobs=[0.5]).replace(b"0.5", b"NaN")
    record = await asked(stream([broken, number, DONE]))
    assert (record.text, record.error) == ("a\ufffd\ufffdb", None)


async def test_an_answer_that_ends_with_its_connection_is_whole() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + WHOLE)
        writer.close()

    record = await asked(answer)
    assert (record.finish_reason, record.error) == ("stop", None)


async def test_a_chunk_has_the_time_at_which_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    now = asyncio.get_running_loop().time
    seen, told_s = asyncio.Event(), []
    add_chunk = ChatRecord.add_chunk

    def noted(record: ChatRecord, chunk: dict[str, Any], now_s: float) -> None:
        add_chunk(record, chunk, now_s)
        seen.set()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told_s.append(now())
        writer.write(HEAD + chunked(ONE))
        await seen.wait()
        told_s.append(now())
        writer.write(chunked(TWO))
        await asyncio.sleep(0.05)
        told_s.append(now())
        writer.write(chunked(DONE) + b"0\r\n\r\n")

    monkeypatch.setattr(ChatRecord, "add_chunk", noted)
    record = await asked(answer)
    first_s, second_s = record.token_times_s
    times_s = [record.sent_s, told_s[0], first_s, told_s[1], second_s, record.end_s]
    assert times_s == sorted(times_s)
    assert record.end_s >= told_s[2]


# ---- what is sent ----


async def test_the_server_gets_the_whole_question() -> None:
    async with scripted(stream([WHOLE])) as server, StreamClient(server.url, "m") as client:
        await client.chat(MESSAGES, 8, seed=3)
        await client.complete([1, 2, 3], 9, ignore_eos=True)
    rest = {"temperature": 0, "model": "m", "stream": True, "stream_options": {"include_usage": True}}
    assert [json.loads(body) for body in server.bodies] == [
        {"messages": MESSAGES, "max_completion_tokens": 8, "seed": 3} | rest,
        {"prompt": [1, 2, 3], "max_tokens": 9, "ignore_eos": True} | rest,
    ]
    paths = [head.split()[1] for head in server.heads]
    assert paths == [b"/v1/chat/completions", b"/v1/completions"]
    assert all(head.count(b"content-type: application/json\r\n") == 1 for head in server.heads)


@pytest.mark.parametrize("slash", ["", "/"])
async def test_it_asks_where_and_as_the_client_beside_it_does(slash: str) -> None:
    async with scripted(stream([WHOLE])) as server:
        headers = {"Authorization": "Bearer sekret"}
        async with httpx.AsyncClient(base_url=f"{server.url}/models/a{slash}", headers=headers, timeout=0.05) as http:
            async with StreamClient.beside(http, "m") as client:
                assert (await client.chat(MESSAGES, 8)).error is None
            async with scripted(silent) as other:
                http.base_url = other.url
                async with StreamClient.beside(http, "m") as client:
                    assert "SocketTimeoutError" in str((await client.chat(MESSAGES, 8)).error)
    (head,) = server.heads
    assert head.startswith(b"post /models/a/v1/chat/completions http/1.1\r\n")
    assert head.count(b"authorization: bearer sekret\r\n") == 1
    assert b"httpx" not in head


async def test_a_prompt_may_be_large() -> None:
    async with scripted(stream([WHOLE])) as server, StreamClient(server.url, "m") as client:
        assert (await client.complete("word " * 500_000, 8)).error is None
    assert len(json.loads(server.bodies[0])["prompt"]) == 2_500_000


@pytest.mark.parametrize(("keep_alive_s", "connections"), [(60.0, 1), (0.0, 3)])
async def test_connections_wait_for_the_next_request_as_long_as_told(keep_alive_s: float, connections: int) -> None:
    async with scripted(stream([WHOLE])) as server:
        async with StreamClient(server.url, "m", keep_alive_s=keep_alive_s) as client:
            assert [(await client.chat(MESSAGES, 8)).error for _ in range(3)] == [None] * 3
    assert server.connections == connections


async def test_no_request_waits_for_a_connection() -> None:
    count, full = 150, asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(server.bodies) == count:
            full.set()
        await full.wait()
        await stream([WHOLE])(reader, writer)

    async with scripted(answer) as server, StreamClient(server.url, "m") as client:
        records = await asyncio.gather(*(client.chat(MESSAGES, 8) for _ in range(count)))
    assert {record.error for record in records} == {None}


# ---- ways ----


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000", "http://localhost:8000/v1", "http://[::1]:8000", "http://a.localhost"]
)
def test_this_machine_is_never_reached_by_a_proxy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line's own clients too; other hosts follow the variables."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://proxy.invalid:1")
    assert _proxy_of(url) is None
    with httpx.Client(mounts=blocking_mounts_for(url)) as client:
        assert client._transport_for_url(httpx.URL(url)) is client._transport
    assert set(mounts_for(url)) == {"http://", "https://", "all://"}
    elsewhere = "http://gpu.example:8000"
    assert _proxy_of(elsewhere) == "http://proxy.invalid:1"
    with httpx.Client(mounts=blocking_mounts_for(elsewhere)) as client:
        assert client._transport_for_url(httpx.URL(elsewhere)) is not client._transport


def test_every_client_of_the_project_says_which_proxies_it_uses() -> None:
    """By the function above, or none: a client that says nothing would use a proxy on this machine too."""
    num_clients = 0
    for path in Path(neaptide.__file__).parent.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for call in ast.walk(ast.parse(source)) if "import httpx" in source else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("httpx.Client", "httpx.AsyncClient"):
                num_clients += 1
                assert {"mounts", "trust_env"} & {keyword.arg for keyword in call.keywords}, f"{path}:{call.lineno}"
    assert num_clients > 5


@pytest.mark.parametrize(
    ("variables", "is_asked"),
    [
        ({"http_proxy": "URL"}, True),
        ({"all_proxy": "HOST"}, True),
        ({"https_proxy": "URL"}, False),
        ({"http_proxy": "URL", "no_proxy": "example.invalid"}, False),
    ],
)
async def test_proxies_are_those_of_the_environment(
    variables: dict[str, str], is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    async with scripted(stream([WHOLE])) as proxy:
        for name, value in variables.items():
            host = proxy.url.removeprefix("http://")
            monkeypatch.setenv(name, value.replace("URL", proxy.url).replace("HOST", host))
        async with StreamClient("http://example.invalid", "m") as client:
            record = await client.chat(MESSAGES, 8)
    assert (record.error is None) is is_asked
    assert [head.split()[1] for head in proxy.heads] == [b"http://example.invalid/v1/chat/completions"] * is_asked


async def test_https_is_answered_if_the_certificate_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    async with scripted(stream([WHOLE]), context) as server:
        async with StreamClient(server.url, "m") as client:
            refused = await client.chat(MESSAGES, 8)
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        async with StreamClient(server.url, "m") as client:
            answered = await client.chat(MESSAGES, 8)
    assert str(refused.error).startswith("ClientConnectorCertificateError: ")
    assert (answered.text, answered.error) == ("oné\u2028two", None)


# ---- what fails ----


async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    raise asyncio.IncompleteReadError(await reader.read(), None)  # when the client has gone


async def hangs_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def resets(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunked(ONE))
    await writer.drain()
    writer.transport.abort()


async def talks_nonsense(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"nonsense\r\n\r\n")


async def breaks_its_framing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunked(ONE) + b"no length\r\n\r\n")


def says(*pieces: bytes) -> Answer:
    return stream(pieces)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (hangs_up, "ServerDisconnectedError: Server disconnected"),
        (resets, "Client(OSError|PayloadError): "),
        (stream([ONE, TWO, DONE], is_whole=False), "ClientPayloadError: Response payload is not completed"),
        (stream([ONE, TWO[:20]], is_whole=False), "ClientPayloadError: Response payload is not completed"),
        (talks_nonsense, "ClientResponseError: 400, message="),
        (breaks_its_framing, "Client(Payload|Response)Error: .*no length"),
        (plain("400 Bad Request", b'{"error": "long"}' + b"x" * 500), r'HTTP 400: \{"error": "long"\}x{183}$'),
        (plain("503 Service Unavailable", b"\xff over"), "HTTP 503: \ufffd over$"),
        (plain("307 Temporary Redirect", b"", b"location: /v1/chat/completions\r\n"), "HTTP 307: $"),
        (says(ONE, b'data: {"error": {"message": "lost"}}\n\n'), "lost$"),
        (says(ONE, DONE), "the stream ended without a finish_reason$"),
        (says(ONE, b"data: {nonsense\n\n", TWO), "JSONDecodeError: "),
        (says(ONE, b"data: 5\n\n", TWO), "ValueError: not a chunk of a stream: 5$"),
        (says(ONE, b'data: {"choices": [{"index": 0}]}\n\n', TWO), "ValueError: not a chunk of a stream: {"),
    ],
)
async def test_what_fails_says_why(answer: Answer, error: str) -> None:
    record = await asked(answer)
    assert re.match(error, str(record.error)), record.error
    assert (record.cancelled, record.e2e_s) == (False, None)
    assert record.end_s > record.sent_s


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("http://127.0.0.1:9", "ClientConnectorError: Cannot connect to host 127.0.0.1:9"),
        ("http://127.0.0.1:99999", "InvalidUrlClientError: "),
        ("ftp://127.0.0.1", "NonHttpUrlClientError: "),
    ],
)
async def test_where_no_server_is_every_request_fails(url: str, error: str) -> None:
    async with StreamClient(url, "m") as client:
        records = [await client.chat(MESSAGES, 8) for _ in range(2)]
    assert all(str(record.error).startswith(error) for record in records), records
    assert not any(record.cancelled for record in records)


@pytest.mark.parametrize("first", [b"", HEAD + chunked(ONE)])
async def test_a_server_that_falls_silent_has_failed(first: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        await silent(reader, writer)

    record = await asked(answer, cancel_after_s=PATIENCE_S, timeout_s=0.05)
    assert record.error == "SocketTimeoutError: Timeout on reading data from socket"
    assert not record.cancelled


async def test_a_question_that_json_cannot_say_fails_alone() -> None:
    async with scripted(stream([WHOLE])) as server, StreamClient(server.url, "m") as client:
        records = [await client.chat(MESSAGES, 8, seed=seed) for seed in ("\ud800", 1 << 70)]
    assert [str(record.error).split(":")[0] for record in records] == ["UnicodeEncodeError", "None"]


# ---- who leaves ----


@pytest.mark.parametrize("first", [b"", HEAD + chunked(ONE)])
async def test_a_client_that_gives_up_hangs_up(first: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        await silent(reader, writer)

    async with scripted(answer) as server, StreamClient(server.url, "m") as client:
        record = await client.chat(MESSAGES, 8, cancel_after_s=0.05)
        await until(server.left.is_set)  # before the client is closed
    assert (record.cancelled, record.error) == (True, None)
    assert record.end_s - record.sent_s >= 0.05
    assert len(record.token_times_s) == bool(first)


async def test_cancelling_from_outside_hangs_up_and_is_no_answer() -> None:
    async with scripted(silent) as server, StreamClient(server.url, "m") as client:
        task = asyncio.create_task(client.chat(MESSAGES, 8, cancel_after_s=PATIENCE_S))
        await until(lambda: server.bodies)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(server.left.is_set)


async def test_a_server_that_reads_nothing_does_not_hold_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neaptide.loadgen.client.client.CLOSE_S", 0.05)
    accepted, goes_on = asyncio.Event(), asyncio.Event()

    async def reads_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set()
        await goes_on.wait()
        writer.transport.abort()

    server = await asyncio.start_server(reads_nothing, "127.0.0.1", 0, limit=1)
    async with server:
        async with StreamClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m") as client:
            asking = asyncio.create_task(client.complete("word " * 5_000_000, 8))
            await accepted.wait()
            await asyncio.sleep(0.05)  # it sends as much as fits
        asking.cancel()
        goes_on.set()
        assert isinstance((await asyncio.gather(asking, return_exceptions=True))[0], asyncio.CancelledError)
        await asyncio.sleep(0.05)  # connections end


# ---- what it costs who does not stream ----


@pytest.mark.parametrize("module", ["neaptide.loadgen.client.client", "neaptide.launch.serve", "neaptide.cli"])
def test_what_streams_nothing_loads_no_second_client(module: str) -> None:
    code = f"import sys, {module}; sys.exit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
