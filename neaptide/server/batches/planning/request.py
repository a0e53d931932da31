"""Request to the planning process, and checks of its answer."""

import math

import msgspec
import numpy as np
import numpy.typing as npt

from neaptide.engine.messages import DualScanPlan, PlanReady
from neaptide.engine.offline.dual_scan import window_rows

NUMBERS = np.dtype("<i4")


class JobRows(msgspec.Struct, array_like=True, frozen=True):
    """Lines of one job. Raw arrays of int32, because a job may have tens of thousands of lines."""

    batch_id: str
    path: str
    """Path stem of the token file."""
    salt: str
    num_rows: int
    """Number of lines in the token file."""
    rows: bytes
    """Line numbers of the open lines."""
    limits: bytes
    """``max_tokens`` of each open line."""
    ended_rows: bytes
    ended_tokens: bytes
    """Answer lengths of the ended lines, in tokens."""
    running_rows: bytes = b""
    """Open lines that have output."""
    running_tokens: bytes = b""
    """Output tokens of each of them so far."""


class PlanRequest(msgspec.Struct, array_like=True, frozen=True):
    jobs: list[JobRows]
    order: str
    token_s: float
    """Seconds that the device takes for a token's matrix products."""
    kv_token_s: float
    """Seconds that the device takes to read the KV of a token."""
    kv_tokens: int
    unit_tokens: int
    tile_tokens: int = 1
    """Tile size: the token count of a step should be a multiple of it."""
    pair_s: float = 0.0
    """Seconds that the device takes for prefill attention of a (query, key) pair."""


class PlanFailed(msgspec.Struct, tag=True, frozen=True):
    """Reason for which there is no plan; quotes nothing of the files."""

    reason: str


Answer = PlanReady | PlanFailed
request_encoder = msgspec.msgpack.Encoder()
request_decoder = msgspec.msgpack.Decoder(PlanRequest)
answer_encoder = msgspec.msgpack.Encoder()
answer_decoder: msgspec.msgpack.Decoder[PlanReady] = msgspec.msgpack.Decoder(PlanReady)
failure_decoder = msgspec.msgpack.Decoder(PlanFailed)


def packed(numbers: npt.ArrayLike) -> bytes:
    return np.asarray(numbers).astype(NUMBERS).tobytes()


def unpacked(numbers: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(numbers, NUMBERS).astype(np.int64)


def check_plan(plan: PlanReady, request: PlanRequest) -> None:
    """Raises ValueError unless the plan names each requested line once, and no other."""
    if plan.batch_ids != [job.batch_id for job in request.jobs]:
        raise ValueError("the plan is of other batches")
    sizes = np.array([job.num_rows for job in request.jobs], np.int64)
    first = np.cumsum(sizes) - sizes
    batches, rows = unpacked(plan.batches), unpacked(plan.rows)
    if len(batches) != len(rows) or (len(rows) and not 0 <= batches.min() <= batches.max() < len(sizes)):
        raise ValueError("the plan names batches that it was not given")
    if (rows < 0).any() or (rows >= sizes[batches]).any():
        raise ValueError("the plan names rows that its batches do not have")
    wanted = np.zeros(int(sizes.sum()), np.int64)
    for start, job in zip(first.tolist(), request.jobs, strict=True):
        wanted[start + unpacked(job.rows)] = 1
    if not np.array_equal(np.bincount(first[batches] + rows, minlength=len(wanted)), wanted):
        raise ValueError("the plan omits or repeats rows")
    if plan.ends is not None:
        _check_ends(plan.ends, len(rows))


def _check_ends(ends: DualScanPlan, num_rows: int) -> None:
    held_tokens = unpacked(ends.held_tokens)
    if len(held_tokens) != num_rows or (held_tokens < 0).any():
        raise ValueError("the plan does not say what its rows hold")
    lasting_steps = unpacked(ends.lasting_steps)
    if len(lasting_steps) != num_rows or (lasting_steps < 0).any():
        raise ValueError("the plan does not say how long its rows last")
    if not np.array_equal(np.sort(unpacked(ends.turns)), np.arange(num_rows)):
        raise ValueError("the plan does not order its rows")
    starts = unpacked(ends.starts)
    if len(starts) not in (0, num_rows) or (np.diff((starts >= 0).astype(np.int64)) < 0).any() or ends.kv_tokens < 0:
        raise ValueError("the plan has a timetable of other rows")
    if ends.tile_tokens < 1:
        raise ValueError("the plan has a tile size below 1")
    if not 0 <= ends.num_first <= num_rows:
        raise ValueError("the plan puts more rows first than it has")
    if {len(ends.densities), len(ends.memory_s)} != {math.ceil(num_rows / window_rows(num_rows))}:
        raise ValueError("the plan has densities of other windows")
    numbers = (*ends.densities, *ends.memory_s, ends.root_density, ends.token_s, ends.kv_token_s)
    if not all(math.isfinite(number) and number >= 0.0 for number in numbers):
        raise ValueError("the plan has invalid numbers")
