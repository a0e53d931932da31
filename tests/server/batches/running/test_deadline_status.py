"""Whether a batch will end in its window: what clients, scrapers and the log are told of it."""

import logging
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from neaptide.engine.messages import BatchDeadlineStatus, DeadlineStatus, StepOutputs
from neaptide.server.batches.metrics import BatchMetrics
from neaptide.server.batches.objects import batch_object
from neaptide.server.batches.running.deadline_status import BatchStatuses
from tests.server.batches.fakes import Server, numbered
from tests.server.batches.test_http import app_of, openai_client

LOGGER = "neaptide.server.batches.running.deadline_status"


def outlook(
    outlook: DeadlineStatus, batch_id: str = "batch_a", expected_s: float | None = 400.0
) -> BatchDeadlineStatus:
    return BatchDeadlineStatus(batch_id, outlook, 300.04, expected_s, 60.0)


def say(server: Server, *outlooks: BatchDeadlineStatus) -> None:
    server.client.on_message(StepOutputs([], [], list(outlooks)))


def shown(server: Server, record: Any) -> Any:
    return batch_object(record, server.service.outlooks)["neaptide"]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            DeadlineStatus.INFEASIBLE,
            "batch batch_a cannot end in its window: it needs 300.0 s with the whole device, 400.0 s",
        ),
        (
            DeadlineStatus.AT_RISK,
            "batch batch_a may not end in its window: it needs 300.0 s with the whole device, 400.0 s",
        ),
    ],
)
def test_the_log_says_what_is_needed_what_is_left_and_what_to_do(
    found: DeadlineStatus, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    BatchStatuses().hear([outlook(found)])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(words)
    assert "60.0 s left" in record.getMessage()
    assert any(advice in record.getMessage() for advice in ("Cancel it", "less online load"))


def test_only_changes_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    outlooks = BatchStatuses()
    course = (
        DeadlineStatus.ON_TIME,
        DeadlineStatus.AT_RISK,
        DeadlineStatus.AT_RISK,
        DeadlineStatus.INFEASIBLE,
        DeadlineStatus.ON_TIME,
        DeadlineStatus.ON_TIME,
    )
    for found in course:
        outlooks.hear([outlook(found)])
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]
    assert "can end in its window again" in caplog.records[-1].getMessage()


def test_before_a_rate_is_known_the_whole_device_is_gone_by(caplog: pytest.LogCaptureFixture) -> None:
    BatchStatuses().hear([outlook(DeadlineStatus.INFEASIBLE, expected_s=None)])
    assert "300.0 s with the whole device, 300.0 s at the current rate" in caplog.text


async def test_a_batch_shows_its_outlook_while_it_runs(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(2))
        assert shown(server, batch) is None
        await server.until_given(batch.id)
        say(server, outlook(DeadlineStatus.INFEASIBLE, batch.id), outlook(DeadlineStatus.ON_TIME, "batch_other"))
        assert shown(server, await server.get(batch.id)) == {
            "outlook": "infeasible",
            "needed_seconds": 300.0,
            "expected_seconds": 400.0,
            "left_seconds": 60.0,
            "waits_for": None,
            "due_at": None,
        }
        say(server, outlook(DeadlineStatus.ON_TIME, batch.id, None))
        found = shown(server, await server.get(batch.id))
        assert (found["outlook"], found["expected_seconds"]) == ("on_time", None)
        server.engine.answer(batch.id)
        assert shown(server, await server.until_terminal(batch.id)) is None


async def test_nothing_is_said_of_batches_while_there_is_no_engine(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(2))
        await server.until_given(batch.id)
        say(server, outlook(DeadlineStatus.INFEASIBLE, batch.id))
        server.client.detach()
        assert shown(server, await server.get(batch.id)) is None


async def test_steps_without_a_report_leave_the_outlook(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(2))
        await server.until_given(batch.id)
        say(server, outlook(DeadlineStatus.AT_RISK, batch.id))
        server.client.on_message(StepOutputs([], []))
        assert shown(server, await server.get(batch.id))["outlook"] == "at_risk"


async def test_a_scrape_counts_batches_by_outlook(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    async with Server(tmp_path) as server:
        BatchMetrics(registry, server.service.store, lambda: 0.0, server.service.outlooks)
        say(
            server,
            *(outlook(found, f"batch_{k}") for k, found in enumerate(DeadlineStatus)),
            outlook(DeadlineStatus.INFEASIBLE, "b"),
        )
        names = {found: {"outlook": found.value} for found in DeadlineStatus}
        counts = {
            found: registry.get_sample_value("neaptide_batches_by_outlook", names[found]) for found in DeadlineStatus
        }
        assert counts == {DeadlineStatus.ON_TIME: 1, DeadlineStatus.AT_RISK: 1, DeadlineStatus.INFEASIBLE: 2}


async def test_the_openai_client_reads_the_outlook(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, openai_client(app_of(server)) as client:
        made = await server.create(numbered(1))
        await server.until_given(made.id)
        say(server, outlook(DeadlineStatus.AT_RISK, made.id))
        batch = await client.batches.retrieve(made.id)
        assert batch.model_extra == {"neaptide": {**shown(server, await server.get(made.id))}}
        (listed,) = (await client.batches.list()).data
        assert listed.model_extra == batch.model_extra
