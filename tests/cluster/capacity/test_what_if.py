"""What-if questions about recorded traffic."""

import copy
from functools import cache

import msgspec
import pytest

from neaptide.cluster.capacity.what_if import GIVE_UP, WhatIfChange, what_if
from neaptide.cluster.capacity.what_if import _scenario as scenario_of
from neaptide.simulation.recorded.recording import TrafficRecording
from tests.simulation.recorded.engines import load, recorded, rows

SECONDS = 8.0


@pytest.fixture(autouse=True)
def short_margins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neaptide.cluster.capacity.what_if.MARGIN_S", 1.0)


@cache
def recording(with_online: bool = True) -> TrafficRecording:
    requests = load(SECONDS, rate=2.0) if with_online else []
    return recorded("neaptide", SECONDS, online=requests, offline=[rows(40)])[0]


def test_with_nothing_changed_it_says_what_one_replica_does() -> None:
    found = what_if(recording(), WhatIfChange())
    assert (
        0.5 < found.changed.requests / len(load(SECONDS, rate=2.0)) <= 1.0
    )  # what ended before the first piece is not known
    assert found.recorded_s == pytest.approx(SECONDS, rel=0.5)
    assert found.changed.attainment["both"] > 0.9
    assert found.changed.offline_tokens_per_s is not None
    assert found.changed.offline_tokens_per_s > 100
    assert found.replicas == 1
    assert found.today == found.changed


@pytest.mark.parametrize(("change", "give_up"), [(WhatIfChange(), GIVE_UP), (WhatIfChange(profile="cpu-111m"), None)])
def test_a_server_that_gives_steps_up_does_so_here_and_not_on_another_device(
    change: WhatIfChange, give_up: object
) -> None:
    served = copy.copy(recording())
    scheduler = msgspec.structs.replace(served.present.scheduler, abortable_steps=True)
    served.present = msgspec.structs.replace(served.present, scheduler=scheduler)
    assert scenario_of(served, change).give_up == give_up
    assert scenario_of(recording(), change).give_up is None


def test_more_traffic_takes_more_replicas() -> None:
    found = what_if(recording(), WhatIfChange(traffic=20.0))
    assert found.changed.attainment["both"] < 0.9
    assert found.replicas is not None
    assert found.replicas > 1


def test_other_targets_are_met_by_others() -> None:
    none = what_if(recording(), WhatIfChange(ttft_slo_s=1e-3))
    assert (none.changed.attainment["ttft"], none.replicas) == (0.0, None)


def test_a_faster_device_does_more_offline_work() -> None:
    here, there = (what_if(recording(), WhatIfChange(profile=name)) for name in (None, "h100-80g-llama-3.1-8b"))
    assert here.changed.offline_tokens_per_s is not None
    assert there.changed.offline_tokens_per_s is not None
    assert there.changed.offline_tokens_per_s > here.changed.offline_tokens_per_s
    assert there.today == here.today


def test_a_device_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match=r"no device profile '/etc/passwd'; there are: .*h100-80g-llama-3.1-8b"):
        what_if(recording(), WhatIfChange(profile="/etc/passwd"))


def test_without_online_requests_there_is_nothing_to_ask() -> None:
    with pytest.raises(ValueError, match="no recorded online request"):
        what_if(recording(with_online=False), WhatIfChange())
