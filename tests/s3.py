"""A bucket of the tests' own, by moto's server of Amazon's protocol, and a passage to it that can be shut; where moto
or s3fs is not installed, tests that need one are skipped."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

BUCKET = "test"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[str, int]]:
    """Address of a server of Amazon's protocol with a bucket; this process finds it by its environment."""
    reason = "no S3 server to test with (pip install neaptide[s3] moto[server])"
    s3fs = pytest.importorskip("s3fs", reason=reason)
    server = pytest.importorskip("moto.server", reason=reason).ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    # It keeps clients, with addresses of servers that were, under what they were asked for with.
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}).items():
            patch.setenv(name, value)
        # Another module may have made it: moto keeps buckets in this process.
        s3fs.S3FileSystem().makedirs(BUCKET, exist_ok=True)
        yield host, port
    server.stop()


@dataclass(slots=True)
class Held:
    """A request that waits in the passage, or whose reply does."""

    needle: bytes
    holds_reply: bool
    is_here: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)
    port: int = 0
    """Of its client."""


class Passage:
    """Between servers and a bucket: passes bytes on, both ways.

    Silent, it takes connections and requests, and nothing comes back until it is open again. Shut, it ends every
    connection at once.
    """

    def __init__(self, host: str, port: int) -> None:
        self._upstream = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open = threading.Event()
        self._open.set()
        self._is_shut = False
        self._held: Held | None = None
        self._sockets: set[socket.socket] = set()
        self.num_refused = 0
        """Connections that were ended since it was shut."""
        self.num_waiting = 0
        """Requests that have come while it is silent."""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def silence(self) -> None:
        self.num_waiting = 0
        self._open.clear()

    def shut(self) -> None:
        self.num_refused = 0
        self._is_shut = True
        for one in list(self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def open(self) -> None:
        self._is_shut = False
        self._open.set()

    def hold(self, needle: bytes, *, reply: bool) -> Held:
        """The next request with ``needle`` in it waits, or its reply does, until ``goes_on`` is set."""
        self._held = Held(needle, reply)
        return self._held

    def close(self) -> None:
        self.open()
        self._listener.close()
        for one in list(self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, (_, port) = self._listener.accept()
            except OSError:
                return
            if self._is_shut:
                self.num_refused += 1
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client, port), daemon=True).start()

    def _serve(self, client: socket.socket, port: int) -> None:
        upstream = socket.create_connection(self._upstream)
        replies: list[Held] = []
        both = {client, upstream}
        self._sockets |= both
        back = threading.Thread(target=self._pass_back, args=(upstream, client, replies), daemon=True)
        back.start()
        with suppress(OSError):
            while data := client.recv(65_536):
                self._take(data, port, replies)
                upstream.sendall(data)
        with suppress(OSError):
            upstream.shutdown(socket.SHUT_RDWR)
        back.join()
        self._sockets -= both
        for one in both:
            one.close()

    def _take(self, data: bytes, port: int, replies: list[Held]) -> None:
        held = self._held
        if held is not None and held.needle in data:
            self._held, held.port = None, port
            if held.holds_reply:
                replies.append(held)
            else:
                held.is_here.set()
                held.goes_on.wait()
        if not self._open.is_set():
            self.num_waiting += 1
            self._open.wait()

    def _pass_back(self, upstream: socket.socket, client: socket.socket, replies: list[Held]) -> None:
        with suppress(OSError):
            while data := upstream.recv(65_536):
                self._open.wait()
                # A reply that lets the body come is none.
                if replies and b" 200 OK" in data:
                    held = replies.pop()
                    held.is_here.set()
                    held.goes_on.wait()
                client.sendall(data)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def passage(s3: tuple[str, int]) -> Iterator[Passage]:
    passage = Passage(*s3)
    yield passage
    passage.close()
