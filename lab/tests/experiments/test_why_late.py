"""Late chats of a short simulated run: every part has a name, and batch work is found where it is."""

from dataclasses import replace

from neaptide.server.why.parts import Cause
from neaptide_lab.experiments.rivals.loads import CONV, scenario_of
from neaptide_lab.experiments.why_late import _explained


def test_late_chats_beside_a_flood_are_late_by_batch_work_alone() -> None:
    load = replace(CONV, window_s=(600.0, 602.0), warm_up_s=1.0)
    scenario = replace(scenario_of(load), policy="priority", ttft_slo_s=0.06, with_bounds=False)
    told, alone_s = _explained(scenario)
    assert told
    assert all(one.missing < 1e-6 for one in told)
    causes_alone_in_time = {
        one.cause for one, real_s in zip(told, alone_s, strict=True) if real_s is not None and real_s < 0.06
    }
    assert causes_alone_in_time == {Cause.BATCH}
