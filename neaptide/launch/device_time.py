"""Device time of batch work, by the cost model that an engine has sent, for quotes."""

import numpy as np

from neaptide.engine.arrays import FloatArray
from neaptide.engine.interfaces import CostModel
from neaptide.engine.messages import EngineReady
from neaptide.engine.offline.work import WholeDevice, Work
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.recipes import build_cost_model
from neaptide.server.quotes.work import BatchWork, DeviceTime

NUM_STEP_SIZES = 12
"""Number of step sizes for which the cost model is asked; between them step times are interpolated."""
PREFILL_FACTOR, DECODE_FACTOR = 0.92, 1.16
"""What prefill and decodes of batch work take beside chats, over their least time on the whole device.

Fitted on 25 replays of an H100's profile; 35 others agree within 2%, other devices perhaps not. Probably prompts ride
in steps whose fixed cost chats pay, and fewer rows decode at once.
"""
MAX_LAST_STEPS = 1 << 17
"""Most steps of the last answers that are followed."""


def device_time(
    info: EngineReady, prefill_factor: float = PREFILL_FACTOR, decode_factor: float = DECODE_FACTOR
) -> DeviceTime | None:
    """Device time of batch work beside chats; None if the engine has not told its costs."""
    if not info.costs:
        return None
    cost_model = build_cost_model(info.costs)
    device = WholeDevice(cost_model, info.max_step_tokens, info.max_num_seqs, info.offline_kv_tokens)

    def beside_chats_s(work: BatchWork, answer_tokens: int) -> float:
        least_s = device.least_seconds(_as_work(work, answer_tokens))
        prefill_s = min(info.token_s * work.new_tokens, least_s)
        return prefill_factor * prefill_s + decode_factor * (least_s - prefill_s)

    def seconds(work: BatchWork) -> float:
        whole_s = beside_chats_s(work, work.answer_tokens)
        if work.longest_answer is None or work.answer_tokens <= work.num_rows:
            return whole_s
        num_last = _rows_at_the_end(device, work)
        running = _running_rows(work, num_last, work.longest_answer)
        last_tokens = min(round(float(running.sum())), work.answer_tokens - work.num_rows)
        rest_s = beside_chats_s(work, work.answer_tokens - last_tokens)
        # One at least runs in a step of the last answers, if any does.
        is_going_on = 1.0 - (1.0 - running / num_last) ** num_last
        context = (work.prompt_tokens + work.answer_tokens) // work.num_rows
        steps_s = _decode_step_s(cost_model, np.maximum(running, 1.0), context)
        return max(whole_s, rest_s + float(is_going_on @ steps_s))

    return seconds


def _as_work(work: BatchWork, answer_tokens: int) -> Work:
    row_tokens = work.prompt_tokens + answer_tokens
    decode_tokens = max(answer_tokens - work.num_rows, 0)
    return Work(work.num_rows, row_tokens, work.prompt_tokens, work.new_tokens, answer_tokens, decode_tokens)


def _rows_at_the_end(device: WholeDevice, work: BatchWork) -> int:
    """Rows that run when no more line waits: those of every full step."""
    num_steps = device.num_steps(_as_work(work, work.answer_tokens))
    return max(min((work.answer_tokens - work.num_rows) // num_steps, work.num_rows), 1)


def _running_rows(work: BatchWork, num_last: int, limit: int) -> FloatArray:
    """[steps] expected number of the last rows that still run after so many steps.

    Only mean and limit of the answers are known, so the lengths have the distribution of largest entropy: geometric,
    cut at the limit. If all rows run at once, all are at their beginning; otherwise they are at random moments.
    """
    mean, limit = work.answer_tokens / work.num_rows, min(limit, MAX_LAST_STEPS)
    longer = _kept_share(mean, limit) ** np.arange(limit)
    if num_last < work.num_rows:
        longer = np.cumsum(longer[::-1])[::-1] / longer.sum()
    return np.asarray(num_last * longer[1:])


def _kept_share(mean: float, limit: int) -> float:
    """Probability that an answer goes on after a token, for which answers cut at the limit have this mean."""
    if mean >= limit:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if (1.0 - middle**limit) / (1.0 - middle) < mean:
            low = middle
        else:
            high = middle
    return low


def _decode_step_s(cost_model: CostModel, num_rows: FloatArray, context: int) -> FloatArray:
    """Times of steps that decode so many rows."""
    sizes = np.unique(np.geomspace(1.0, max(float(num_rows.max()), 1.0), NUM_STEP_SIZES).round())
    times = []
    for size in sizes.astype(int).tolist():
        shape = BatchShape()
        shape.add_decodes(size, size * context, context)
        times.append(cost_model.predict(shape).seconds)
    return np.asarray(np.interp(num_rows, sizes, times))
