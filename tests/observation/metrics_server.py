"""A server that shows pages of metrics one after the other, then the last one again."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class MetricsServer:
    """What was asked, and what is shown."""

    def __init__(self, pages: Sequence[str]) -> None:
        self.pages = list(pages)
        self.url = ""
        self.paths: list[str] = []
        self.methods: set[str] = set()
        self.keys: set[str | None] = set()
        self.failing: frozenset[int] = frozenset()
        """Numbers of the looks that are answered with an error."""


@contextmanager
def metrics_server(pages: Sequence[str]) -> Iterator[MetricsServer]:
    state = MetricsServer(pages)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            number = len(state.paths)
            state.paths.append(self.path)
            state.methods.add(self.command)
            state.keys.add(self.headers["Authorization"])
            failed = number in state.failing
            body = b"no" if failed else state.pages[min(number, len(state.pages) - 1)].encode()
            self.send_response(503 if failed else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        state.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
