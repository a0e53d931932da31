"""Polling of a server, on a clock that does not wait."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from neaptide.observation.polling import Polling, PollingError, Timer, metrics_url, record_polls, shown_url
from neaptide.observation.record import ServerRecord, read_record
from tests.observation.metrics_server import MetricsServer, metrics_server
from tests.observation.pretended import VllmMetrics


class FakeClock:
    """Time passes only in sleeps, and by a fixed time of each look."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.stop_at_s: float | None = None

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.stop_at_s is not None and self.now_s >= self.stop_at_s:
            raise KeyboardInterrupt

    @property
    def timer(self) -> Timer:
        return Timer(lambda: self.now_s, self.sleep, lambda: 5000.0)


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    metrics, pages = VllmMetrics(100, 16), []
    for number in range(5):
        metrics["prompt_tokens"].inc(10 * number)
        pages.append(metrics.page())
    with metrics_server(pages) as state:
        yield state


def polled(server: MetricsServer, clock: FakeClock, path: Path) -> ServerRecord:
    with httpx.Client(trust_env=False) as client:
        record_polls(client, Polling(server.url, 1.0, 4.0), path, clock.timer)
    return read_record(path)


def test_the_server_is_asked_for_its_metrics_and_nothing_else(server: MetricsServer, tmp_path: Path) -> None:
    found = polled(server, FakeClock(), tmp_path / "record")
    assert (set(server.paths), server.methods) == ({"/metrics"}, {"GET"})
    assert (found.header.server, found.header.started) == (server.url, 5000.0)
    assert found.header.labels == {"model_name": "pretended", "block_size": "16", "num_gpu_blocks": "100"}


def test_every_interval_has_what_rose_in_it(server: MetricsServer, tmp_path: Path) -> None:
    found = polled(server, FakeClock(), tmp_path / "record")
    assert [(each.start_s, each.end_s) for each in found.intervals] == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]
    assert [each.rise("prompt_tokens_total") for each in found.intervals] == [10.0, 20.0, 30.0, 40.0]


def test_a_look_that_fails_ends_nothing(server: MetricsServer, tmp_path: Path) -> None:
    server.failing = frozenset({2})
    found = polled(server, FakeClock(), tmp_path / "record")
    assert found.failures == 1
    assert [each.rise("prompt_tokens_total") for each in found.intervals] == [10.0, 50.0, 40.0]


def test_ctrl_c_ends_the_record_early(server: MetricsServer, tmp_path: Path) -> None:
    clock = FakeClock()
    clock.stop_at_s = 102.5
    assert polled(server, clock, tmp_path / "record").seconds == 2.0


def test_a_first_look_that_fails_is_one_line(server: MetricsServer, tmp_path: Path) -> None:
    server.failing = frozenset({0})
    with pytest.raises(PollingError, match=r"/metrics: the server answered HTTP 503"):
        polled(server, FakeClock(), tmp_path / "record")


def test_a_record_of_before_is_kept_where_the_server_is_away(server: MetricsServer, tmp_path: Path) -> None:
    server.failing = frozenset({0})
    (tmp_path / "record").write_bytes(b"before")
    with pytest.raises(PollingError):
        polled(server, FakeClock(), tmp_path / "record")
    assert (tmp_path / "record").read_bytes() == b"before"


@pytest.mark.parametrize("url", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/", "http://a:1/metrics"])
def test_the_address_of_the_metrics_follows_from_any_address(url: str) -> None:
    assert metrics_url(url) == "http://a:1/metrics"


def test_a_record_names_no_password() -> None:
    assert shown_url("https://user:secret@a.example:8443/v1?key=secret") == "https://a.example:8443/v1"
