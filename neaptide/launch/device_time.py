"""Device time of batch work, by the cost model that an engine has sent, for quotes."""

from neaptide.engine.messages import EngineReady
from neaptide.engine.offline.work import WholeDevice, Work
from neaptide.estimator.recipes import build_cost_model
from neaptide.server.quotes.work import BatchWork, DeviceTime


def device_time(info: EngineReady) -> DeviceTime | None:
    """Least time of batch work on the whole device; None if the engine has not told its costs."""
    if not info.costs:
        return None
    device = WholeDevice(build_cost_model(info.costs), info.max_step_tokens, info.max_num_seqs, info.offline_kv_tokens)

    def seconds(work: BatchWork) -> float:
        row_tokens = work.prompt_tokens + work.answer_tokens
        decode_tokens = max(work.answer_tokens - work.num_rows, 0)
        return device.least_seconds(
            Work(work.num_rows, row_tokens, work.prompt_tokens, work.new_tokens, work.answer_tokens, decode_tokens)
        )

    return seconds
