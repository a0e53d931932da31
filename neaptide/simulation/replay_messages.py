"""Turns the lines of a step log into the engine's messages, with tokens that represent recorded blocks."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from neaptide.engine.messages import (
    AbortRequest,
    AddBatch,
    AddRequest,
    CancelBatch,
    DualScanPlan,
    PlanReady,
    SetOffline,
    SetShareWeights,
    ToEngine,
)
from neaptide.engine.offline.planned import raw
from neaptide.engine.offline.prefix_tree import PrefixTree
from neaptide.engine.offline.token_file import TokenFile, TokenFileWriter
from neaptide.engine.params import FinishReason, SamplingParams
from neaptide.engine.record.block_numbers import Ranges
from neaptide.engine.record.step_log import (
    AbortLine,
    AddLine,
    BatchLine,
    CancelLine,
    Line,
    Message,
    OrderLine,
    StepLine,
    WeightsLine,
)
from neaptide.engine.row_id import RowId
from neaptide.simulation.logged_requests import LoggedRequests
from neaptide.simulation.replay_executor import Answer

FIRST_BLOCK_TOKEN_ID = 2
"""Block number b becomes tokens b + 2, so that exactly equal numbers are equal text."""


class ReplayMessages:
    """The messages of a log, requested in its order.

    Args:
        directory: for the token files of batches.
    """

    def __init__(self, lines: Sequence[Line], block_size: int, directory: Path) -> None:
        self.requests = LoggedRequests()
        for line in lines:
            self.requests.take(line)
        self._block_size = block_size
        self._directory = directory
        self.answers = self._read_answers(lines)
        """By handle."""
        self.handles: dict[str, int] = {}
        """Id -> handle of the requests sent so far. An id may be reused after its request has ended."""
        self._next_handle = 0
        self._row_ranks = _row_ranks(lines)
        self._row_handles: dict[str, dict[int, int]] = {}
        """By stem of the token file."""
        self._files = _files(lines)

    def message(self, line: Message) -> ToEngine:
        if isinstance(line, AddLine):
            return AddRequest(
                line.id,
                self._prompt(self._name_next()),
                _params(line.max_tokens, line.scores_prompt),
                line.tier,
                line.arrival_s,
                line.ttft_slo_s,
                line.tpot_slo_s,
                share=line.share,
            )
        if isinstance(line, BatchLine):
            return self._batch(line)
        if isinstance(line, AbortLine):
            return AbortRequest(line.ids, FinishReason(line.reason))
        if isinstance(line, CancelLine):
            return CancelBatch(line.id)
        if isinstance(line, OrderLine):
            return self._order(line)
        if isinstance(line, WeightsLine):
            return SetShareWeights(line.weights)
        return SetOffline(line.paused)

    def _order(self, line: OrderLine) -> PlanReady:
        """The recorded plan. Ended rows keep their ranks, which windows depend on, but belong to no batch."""
        names = [RowId.parse(self.requests[handle].request_id) if handle >= 0 else None for handle in line.rows]
        batch_ids = sorted({name.batch_id for name in names if name is not None})
        number = {batch_id: index for index, batch_id in enumerate(batch_ids)}
        batches = [-1 if name is None else number[name.batch_id] for name in names]
        rows = [0 if name is None else name.row for name in names]
        ends = None
        if line.ends:
            root_density, token_s, kv_token_s = line.ends
            held_tokens, lasting_steps, turns = map(raw, (line.held_tokens, line.lasting_steps, line.turns))
            windows, prices = (line.densities, line.memory_s), (root_density, token_s, kv_token_s)
            table = raw(line.starts), line.kv_tokens
            ends = DualScanPlan(held_tokens, lasting_steps, *windows, *prices, turns, *table, line.first, line.tile)
        return PlanReady(batch_ids, raw(batches), raw(rows), ends)

    def row_rank(self, tokens: TokenFile, row: int) -> int:
        """A ``RowKey``: the row's rank in its batch by text, which the log does not contain."""
        return self._row_ranks[self._row_handles[tokens.stem][row]]

    def _batch(self, line: BatchLine) -> AddBatch:
        stem = self._file(line)
        for _ in line.rows:
            self._name_next()
        scored = set(line.scores_prompt)
        kinds = {(max_tokens, row in scored): 0 for row, _, max_tokens in line.rows}
        for index, kind in enumerate(kinds):
            kinds[kind] = index
        return AddBatch(
            line.id,
            stem,
            [row for row, *_ in line.rows],
            [_params(*kind) for kind in kinds],
            [kinds[max_tokens, row in scored] for row, _, max_tokens in line.rows],
            [],
            line.deadline_s,
            share=line.share,
        )

    def _file(self, line: BatchLine) -> str:
        """The stem of the token file, which is written when a line first names it."""
        handles = self._files[line.file] if line.file else _handles(line, self._next_handle)
        name = f"file{line.file}" if line.file else f"line{len(self._row_handles)}"
        stem = str(self._directory / name)
        if stem not in self._row_handles:
            self._row_handles[stem] = handles
            num_rows = max([len(line.prefixes.get("rows", [])), *(row + 1 for row in handles)])
            with TokenFileWriter(stem, is_durable=False) as writer:
                for row in range(num_rows):
                    writer.append(self._prompt(handles[row]) if row in handles else [])
            if line.prefixes:
                tree = PrefixTree(**{name: np.array(column, np.int64) for name, column in line.prefixes.items()})
                tree.save(stem, is_durable=False)
        return stem

    # ---- tokens that stand for the recorded blocks ----

    def _read_answers(self, lines: Sequence[Line]) -> list[Answer]:
        ends = [end for line in lines if isinstance(line, StepLine) for end in line.end]
        blocks = [request.blocks for request in self.requests] + [end[3] for end in ends]
        first_filler = FIRST_BLOCK_TOKEN_ID + max((sum(pair) for b in blocks for pair in _pairs(b)), default=0)
        answers = [
            Answer(
                request.prompt_tokens,
                first_filler + handle,
                request.prompt_tokens // self._block_size * self._block_size,
            )
            for handle, request in enumerate(self.requests)
        ]
        for handle, num_tokens, reason, tail in ends:
            answer = answers[handle]
            answer.num_tokens, answer.reason = num_tokens, FinishReason(reason)
            answer.tail = list(self._tokens(tail))
        return answers

    def _name_next(self) -> int:
        """The handle of the log's next request. From now on its id means this request."""
        handle = self._next_handle
        self.handles[self.requests[handle].request_id] = handle
        self._next_handle += 1
        return handle

    def _prompt(self, handle: int) -> list[int]:
        request, answer = self.requests[handle], self.answers[handle]
        prompt = list(self._tokens(request.blocks))
        return prompt + [answer.token(position) for position in range(len(prompt), request.prompt_tokens)]

    def _tokens(self, blocks: Ranges) -> Iterator[int]:
        for first, count in _pairs(blocks):
            for number in range(first, first + count):
                yield from [FIRST_BLOCK_TOKEN_ID + number] * self._block_size


def _row_ranks(lines: Sequence[Line]) -> dict[int, int]:
    """Handle of a row -> its rank among the rows of its batch, across messages."""
    behind: dict[int, int] = {}
    """The row after each row; -1 maps to the first row."""
    handle = 0
    for line in lines:
        if isinstance(line, BatchLine):
            predecessors = line.behind or [-1] * len(line.order)
            for index, predecessor in reversed(list(zip(line.order, predecessors, strict=True))):
                behind[handle + index] = behind.get(predecessor, -1)
                behind[predecessor] = handle + index
            handle += len(line.rows)
        elif isinstance(line, AddLine):
            handle += 1
    ranks: dict[int, int] = {}
    handle = behind.get(-1, -1)
    while handle != -1:
        ranks[handle] = len(ranks)
        handle = behind[handle]
    return ranks


def _files(lines: Sequence[Line]) -> dict[int, dict[int, int]]:
    """Number of a token file -> handles by row, across lines."""
    files: dict[int, dict[int, int]] = {}
    handle = 0
    for line in lines:
        if isinstance(line, BatchLine):
            files.setdefault(line.file, {}).update(_handles(line, handle))
            handle += len(line.rows)
        elif isinstance(line, AddLine):
            handle += 1
    return files


def _handles(line: BatchLine, first: int) -> dict[int, int]:
    """Row -> handle, for the line's rows."""
    return {row: first + index for index, (row, *_) in enumerate(line.rows)}


def _pairs(blocks: Ranges) -> Iterator[tuple[int, int]]:
    """First number and count of each run."""
    return zip(blocks[::2], blocks[1::2], strict=True)


def _params(max_tokens: int, scores_prompt: bool) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, prompt_logprobs=0 if scores_prompt else None)
