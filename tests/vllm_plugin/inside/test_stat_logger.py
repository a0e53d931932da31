"""Which servers have the scheduler's series: vLLM loads their plug-in wherever the package is installed."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.metrics.stats import SchedulerStats

import neaptide_vllm
from neaptide_vllm import stat_logger
from neaptide_vllm.stat_logger import NeaptideStatLogger, _metrics, can_carry


def logger(scheduler_cls: Any) -> NeaptideStatLogger:
    return NeaptideStatLogger(SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=scheduler_cls)))


@pytest.mark.parametrize("scheduler_cls", [None, "vllm.v1.core.sched.scheduler.Scheduler", SimpleNamespace])
def test_a_server_without_our_scheduler_has_none(scheduler_cls: Any) -> None:
    before = _metrics.cache_info()
    logger(scheduler_cls).record(SchedulerStats(), None)
    assert _metrics.cache_info() == before


@pytest.mark.parametrize("scheduler_cls", [None, "neaptide_vllm.scheduler"])
def test_a_version_of_vllm_that_cannot_carry_them_goes_on(scheduler_cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stat_logger, "can_carry", lambda: False)
    before = _metrics.cache_info()
    logger(scheduler_cls).record(SimpleNamespace(), None)
    assert _metrics.cache_info() == before


@pytest.mark.skipif(not can_carry(), reason="this version of vLLM cannot carry the series")
@pytest.mark.parametrize("scheduler_cls", ["neaptide_vllm.scheduler", neaptide_vllm.scheduler])
def test_a_server_with_our_scheduler_has_them(scheduler_cls: Any) -> None:
    ours = logger(scheduler_cls)
    ours.record(SchedulerStats(num_kv_fetch_reqs_by_stage={"neaptide/active": 1}), None)
    assert ours._children["neaptide/active"]._value.get() == 1
