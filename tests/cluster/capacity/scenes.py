"""A load whose need can be worked out by hand."""

from neaptide.cluster.capacity.planner import Question
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.scenario import Scenario
from tests.simulation.scenes import constant, online

NUM_REQUESTS = 20


def every_so_often(count: int = NUM_REQUESTS) -> list[TraceRequest]:
    """Each holds its seat for five steps of 0.1 s, so that one seat takes two of these a second and three come."""
    return online(*((1.0 + 0.3 * k, 4, 5) for k in range(count)))


def one_slot(**fields: object) -> Scenario:
    """A first token comes 0.1 s after a seat is free, and must come 0.15 s after the arrival."""
    return constant(max_num_seqs=1, policy="fcfs", ttft_slo_s=0.15, **fields)


def question(**fields: object) -> Question:
    values: dict[str, object] = {"base": one_slot(), "trace": every_so_often(), "peak_s": 60.0, "margin_s": 1.0}
    return Question(**(values | fields))  # type: ignore[arg-type]
