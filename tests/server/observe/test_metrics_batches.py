"""The series of the batch plane, and of the prefix cache by class."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from neaptide.server.batches import metrics
from neaptide.server.batches.metrics import BatchMetrics, Overview
from neaptide.server.batches.running.deadline_status import BatchStatuses
from tests.patience import PATIENCE_S
from tests.server.batches.fakes import Server, jsonl, line, numbered
from tests.server.conftest import Server as OnlineServer


@pytest.fixture(autouse=True)
def patient_with_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape does without figures that take too long, which they may on a busy machine."""
    monkeypatch.setattr(metrics, "READ_TIMEOUT_S", PATIENCE_S)


async def test_every_series_is_there_before_anything_happened(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    async with Server(tmp_path) as server:
        await BatchMetrics(registry, server.service.store, lambda: 0.0, BatchStatuses()).refresh()
    assert registry.get_sample_value("neaptide_batches", {"status": "in_progress"}) == 0
    assert registry.get_sample_value("neaptide_batch_requests_total", {"outcome": "failed"}) == 0
    assert registry.get_sample_value("neaptide_batch_job_seconds_count", {"status": "completed"}) == 0
    assert registry.get_sample_value("neaptide_batch_deadline_slack_seconds") is None
    assert registry.get_sample_value("neaptide_batch_oldest_age_seconds") == 0


async def test_before_the_database_has_answered_once_nothing_is_said_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A counter that showed 0 and then what it was before the start would seem to have grown by that."""
    monkeypatch.setattr(metrics, "REFRESH_S", 0.0)
    registry = CollectorRegistry()
    async with Server(tmp_path) as server:
        batch = await server.create(jsonl([line("a")]))
        await server.until_given(batch.id)
        server.engine.answer(batch.id)
        await server.until_terminal(batch.id)
        series = BatchMetrics(registry, server.service.store, lambda: server.clock.now_s, server.service.outlooks)
        with monkeypatch.context() as patched:
            patched.setattr(metrics, "READ_TIMEOUT_S", 0.0)
            await series.refresh()
        said = {sample.name for family in registry.collect() for sample in family.samples}
        assert said == {"neaptide_batches_by_outlook", "neaptide_batch_chunks_held", "neaptide_batch_claims_lost_total"}
        await series.refresh()
        assert registry.get_sample_value("neaptide_batch_requests_total", {"outcome": "completed"}) == 1
        assert registry.get_sample_value("neaptide_batch_job_seconds_count", {"status": "completed"}) == 1


async def test_batches_are_counted_as_they_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "REFRESH_S", 0.0)
    registry = CollectorRegistry()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"neaptide_{name}", labels)

    async with Server(tmp_path) as server:
        series = BatchMetrics(registry, server.service.store, lambda: server.clock.now_s, server.service.outlooks)
        batch = await server.create(jsonl([line("a"), line("b"), line("c", temperature=3)]))
        await server.until_given(batch.id)
        server.engine.answer(batch.id, 1)
        await server.until(batch.id, lambda record: record.num_completed == 1)
        server.clock.now_s += 100
        await series.refresh()
        assert (value("batches", status="in_progress"), value("batches", status="completed")) == (1, 0)
        assert value("batch_requests_pending") == 1
        assert value("batch_requests_total", outcome="completed") == 1
        assert value("batch_requests_total", outcome="failed") == 1
        assert value("batch_deadline_slack_seconds") == 86_400 - 100
        assert value("batch_oldest_age_seconds") == 100
        input_bytes = value("files_bytes")
        server.engine.answer(batch.id)
        record = await server.until_terminal(batch.id)
        await series.refresh()
        assert (value("batches", status="in_progress"), value("batches", status="completed")) == (0, 1)
        assert value("batch_requests_pending") == 0
        assert value("batch_job_seconds_bucket", status="completed", le="60.0") == 0
        assert value("batch_job_seconds_bucket", status="completed", le="300.0") == 1
        assert value("batch_job_seconds_sum", status="completed") == 100
        assert value("batch_deadline_slack_seconds") is None
        outputs = sum(len(server.bytes_of(name)) for name in (record.output_file_id, record.error_file_id))
        assert input_bytes is not None
        assert value("files_bytes") == input_bytes + outputs


async def test_a_scrape_survives_a_database_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "REFRESH_S", 0.0)
    registry = CollectorRegistry()
    async with Server(tmp_path) as server:
        series = BatchMetrics(registry, server.service.store, lambda: server.clock.now_s, server.service.outlooks)
        await server.upload(numbered(1))
        await series.refresh()
        before = registry.get_sample_value("neaptide_files_bytes")

        def broken(conn: object) -> None:
            raise OSError("disk I/O error")

        monkeypatch.setattr(metrics, "read_overview", broken)
        await series.refresh()
        assert registry.get_sample_value("neaptide_files_bytes") == before


async def test_many_scrapes_read_the_database_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    def counted(conn: object) -> Overview:
        reads.append(conn)
        return Overview()

    monkeypatch.setattr(metrics, "read_overview", counted)
    async with Server(tmp_path) as server:
        series = BatchMetrics(
            CollectorRegistry(), server.service.store, lambda: server.clock.now_s, server.service.outlooks
        )
        for _ in range(50):
            await series.refresh()
    assert len(reads) == 1


async def test_prefix_cache_series_of_vllm_know_online_work_only(server: OnlineServer) -> None:
    server.engine.emit_stats(
        cached_tokens=48, admitted_prompt_tokens=64, online_cached_tokens=16, online_admitted_prompt_tokens=24
    )
    text = (await server.http.get("/metrics")).text
    labels = f'{{engine="0",model_name="{server.context.model_id}"}}'
    assert f"vllm:prefix_cache_hits_total{labels} 16.0" in text
    assert f"vllm:prefix_cache_queries_total{labels} 24.0" in text
    assert "neaptide_prefix_cache_hit_tokens_total 48.0" in text
    assert "neaptide_prefix_cache_query_tokens_total 64.0" in text
