"""Turns recorded traffic into a load: requests with their lengths and shared prefixes."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from neaptide.engine.kv.prefix_index import extend_block_hashes
from neaptide.engine.offline.token_file import TokenFile
from neaptide.engine.params import FinishReason, Tier
from neaptide.engine.record.traffic import NAME_BYTES, ServedRequest, WaitingRows
from neaptide.engine.row_id import RowId
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import Segments, TraceRequest
from neaptide.simulation.recorded.recording import TrafficRecording, is_online, num_sampled

PRIOR_OUTPUT_TOKENS = 256
"""Assumed answer length if nothing is known."""
Place = tuple[bool, float, float, int]
"""Sort key of rows."""
OWN_TEXT = 1 << 63
"""Content ids from here on belong to one request only; those of blocks are hashes."""


@dataclass(slots=True)
class RecordedLoad:
    """The work from a moment on, on a clock that is 0 at that moment."""

    online: list[TraceRequest]
    """By arrival."""
    served: list[ServedRequest]
    """The recorded outcome of each online request."""
    offline: list[OfflineSet]
    is_cut: bool
    """Whether more rows waited than were taken."""


class LoadMaker:
    """Makes the load of a recording from a moment on.

    Args:
        origin_s: work that had ended by then is skipped. Running work arrives at once, with its remaining part.
        max_tokens: most tokens of a request, prompt and output.
        row_tokens: number of tokens of waiting rows that are taken.
    """

    def __init__(self, recording: TrafficRecording, origin_s: float, max_tokens: int, row_tokens: float) -> None:
        self._recording = recording
        self._origin_s = origin_s
        self._max_tokens = max_tokens
        self._row_tokens = row_tokens
        self._block_size = recording.present.block_size
        self._num_own = 0
        served = recording.served(origin_s)
        self._online = sorted((one for one in served if is_online(one)), key=lambda one: one.arrival_s)
        self._started = [one for one in served if not is_online(one)]
        self._lengths = _Lengths(self._started)

    def load(self) -> RecordedLoad:
        online, kept = [], []
        for one in self._online:
            request = self._request(one, self._expected(one, self._online))
            if request.input_tokens < self._max_tokens:
                online.append(request)
                kept.append(one)
        rows, is_cut = self._rows()
        sets = [OfflineSet("recorded", rows, synthetic=False)] if rows else []
        return RecordedLoad(online, kept, sets, is_cut)

    def _rows(self) -> tuple[list[TraceRequest], bool]:
        if self._recording.is_paused:
            return [], False
        started = [(self._order(one), self._request(one, self._expected_row(one))) for one in self._started]
        waiting, is_cut = self._waiting()
        both = sorted(started + waiting, key=lambda entry: entry[0])
        return [row for _, row in both if row.input_tokens < self._max_tokens], is_cut

    def _order(self, one: ServedRequest) -> Place:
        """Sort key: running rows first, then as engines without classes order them: flex, then batches by deadline."""
        row = RowId.parse(one.request_id)
        deadline_s = -math.inf if one.tier is Tier.FLEX else one.deadline_s
        runs = 0.0 < one.scheduled_s < self._origin_s
        return not runs, deadline_s, one.arrival_s, 0 if row is None else row.row

    # ---- one request ----

    def _request(self, one: ServedRequest, num_tokens: int) -> TraceRequest:
        """A request with ``num_tokens`` answer tokens, including the end of sequence."""
        done = min(self._done(one), num_tokens - 1)
        return TraceRequest(
            max(one.arrival_s - self._origin_s, 0.0),
            self._text(one.blocks, one.prompt_tokens + done),
            num_tokens - done,
        )

    def _done(self, one: ServedRequest) -> int:
        """Answer tokens at the origin, assuming an even pace."""
        if not 0.0 < one.first_token_s < self._origin_s:
            return 0
        end_s = self._recording.now_s if one.reason is None else one.ended_s
        return int(one.output_tokens * (self._origin_s - one.first_token_s) / max(end_s - one.first_token_s, 1e-9))

    def _text(self, names: bytes, num_tokens: int) -> Segments:
        """A text of ``num_tokens`` tokens: the named blocks, followed by text that no other request has."""
        size, (whole, rest) = self._block_size, divmod(num_tokens, self._block_size)
        known = np.frombuffer(names, f">u{NAME_BYTES}")[: whole + (rest > 0)].tolist()
        segments = [(name, size) for name in known]
        missing = num_tokens - size * len(known)
        if missing < 0:
            segments[-1] = known[-1], size + missing
        elif missing:
            self._num_own += 1
            segments.append((OWN_TEXT + self._num_own, missing))
        return tuple(segments)

    # ---- lengths that are not known ----

    def _expected(self, one: ServedRequest, others: Sequence[ServedRequest]) -> int:
        if one.reason is not None:
            return max(num_sampled(one), 1)
        ended = [num_sampled(other) for other in others if other.reason in (FinishReason.STOP, FinishReason.LENGTH)]
        mean = sum(ended) // len(ended) if ended else PRIOR_OUTPUT_TOKENS
        return max(min(mean, one.max_tokens), one.output_tokens + 1)

    def _expected_row(self, one: ServedRequest) -> int:
        if one.reason is not None:
            return max(num_sampled(one), 1)
        row = RowId.parse(one.request_id)
        batch_id, number = ("", 0) if row is None else row
        return max(self._lengths.of(batch_id, number, one.max_tokens), one.output_tokens + 1)

    # ---- rows that wait ----

    def _waiting(self) -> tuple[list[tuple[Place, TraceRequest]], bool]:
        found: list[tuple[Place, TraceRequest]] = []
        left_tokens = self._row_tokens
        for rows in sorted(self._recording.present.waiting, key=lambda rows: (rows.deadline_s, rows.arrival_s)):
            try:
                tokens = TokenFile(rows.stem)
            except (OSError, ValueError):
                continue  # its batch has ended meanwhile
            for number, row in self._in_file_order(rows, tokens):
                if left_tokens <= 0:
                    return found, True
                found.append(((True, rows.deadline_s, rows.arrival_s, number), row))
                left_tokens -= row.input_tokens + row.output_tokens
        return found, False

    def _in_file_order(self, waiting: WaitingRows, tokens: TokenFile) -> Iterator[tuple[int, TraceRequest]]:
        numbers, limits = (np.frombuffer(column, np.int32) for column in (waiting.rows, waiting.max_tokens))
        for index in np.argsort(numbers, kind="stable").tolist():
            number, limit = int(numbers[index]), int(limits[index])
            prompt = tokens.tokens(number)
            hashes: list[bytes] = []
            extend_block_hashes(hashes, prompt, self._block_size, waiting.salt)
            names = b"".join([one[:NAME_BYTES] for one in hashes])
            arrival_s = max(waiting.arrival_s - self._origin_s, 0.0)
            outputs = max(self._lengths.of(waiting.batch_id, number, limit), 1)
            yield number, TraceRequest(arrival_s, self._text(names, len(prompt)), outputs)


class _Lengths:
    """Estimates the answer lengths of rows without an end by those of ended rows, of the same batch if possible."""

    def __init__(self, served: Sequence[ServedRequest]) -> None:
        self._of_batch: dict[str, list[int]] = defaultdict(list)
        self._all: list[int] = []
        for one in served:
            row = RowId.parse(one.request_id)
            if one.reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._all.append(num_sampled(one))
                if row is not None:
                    self._of_batch[row.batch_id].append(num_sampled(one))

    def of(self, batch_id: str, row: int, max_tokens: int) -> int:
        known = self._of_batch.get(batch_id) or self._all
        return min(known[row % len(known)] if known else PRIOR_OUTPUT_TOKENS, max_tokens)
