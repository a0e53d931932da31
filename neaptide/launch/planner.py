"""A process that plans the order of the offline pool without slowing the engine, which can continue without it.

``python -m neaptide.launch.planner`` reads one request from its standard input, maps the jobs' token files, and writes
the plan to its standard output. Frames are a length (4 bytes, big-endian) and msgpack. It runs at idle priority, with
bounded memory.
"""

from pathlib import Path

import numpy as np

from neaptide.engine.messages import PlanReady
from neaptide.engine.offline.density import DensityModel
from neaptide.engine.offline.planning.pooled import DUAL_SCAN, PooledJob, PooledRows
from neaptide.engine.offline.token_file import TokenFile
from neaptide.server.batches.planning.request import (
    Answer,
    JobRows,
    PlanFailed,
    PlanRequest,
    answer_encoder,
    request_decoder,
    unpacked,
)
from neaptide.server.subprocesses.child import bound_memory, pipes, set_idle_priority
from neaptide.server.subprocesses.frames import read_frame, write_frame

NICENESS = 19
MEMORY_BYTES = 4 << 30
"""Without the token files; 400,000 rows need a quarter of it."""


def main() -> None:
    set_idle_priority(NICENESS, is_idle=True)
    source, sink = pipes()
    request = request_decoder.decode(read_frame(source) or b"")
    mapped_bytes = sum(Path(f"{job.path}.tokens").stat().st_size for job in request.jobs)
    bound_memory(MEMORY_BYTES + mapped_bytes, beside_what_is_here=True)
    write_frame(sink, answer_encoder.encode(_answer(request)))


def _answer(request: PlanRequest) -> Answer:
    try:
        return made(request)
    except (OSError, ValueError, MemoryError) as error:
        return PlanFailed(type(error).__name__)


def made(request: PlanRequest) -> PlanReady:
    """Makes the plan.

    Raises OSError or ValueError for a missing or torn token file, ExtensionError for an order that cannot be used,
    MemoryError.
    """
    pooled = PooledRows([_job(job) for job in request.jobs], request.unit_tokens)
    known, so_far = list[tuple[int, int, float]](), list[tuple[int, int, float]]()
    for number, job in enumerate(request.jobs):
        known += _numbers(number, job.ended_rows, job.ended_tokens)
        has_no_end = set(unpacked(job.rows).tolist())  # a running row may have ended meanwhile
        so_far += [one for one in _numbers(number, job.running_rows, job.running_tokens) if one[1] in has_no_end]
    model = DensityModel.in_seconds(request.token_s, request.kv_token_s, request.pair_s, request.tile_tokens)
    return pooled.plan(request.order, known, model, request.kv_tokens, so_far, samples_first=request.order == DUAL_SCAN)


def _numbers(job: int, rows: bytes, num_tokens: bytes) -> list[tuple[int, int, float]]:
    """(job, row, number) for each of the rows."""
    found = zip(unpacked(rows).tolist(), unpacked(num_tokens).tolist(), strict=True)
    return [(job, row, float(number)) for row, number in found]


def _job(job: JobRows) -> PooledJob:
    tokens = TokenFile(job.path)
    if len(tokens) != job.num_rows:
        raise ValueError("a token file does not have its job's number of rows")
    rows = unpacked(job.rows)
    waits, limits = np.zeros(job.num_rows, np.bool_), np.ones(job.num_rows, np.int64)
    waits[rows], limits[rows] = True, unpacked(job.limits)
    return PooledJob(job.batch_id, tokens, waits, limits, job.salt, unpacked(job.ended_rows))


if __name__ == "__main__":
    main()
