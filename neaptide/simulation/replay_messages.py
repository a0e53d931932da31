"""From the lines of a step log to the messages that the engine was told, with tokens that stand for recorded blocks."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from neaptide.engine.messages import AbortRequest, AddBatch, AddRequest, CancelBatch, SetOffline, ToEngine
from neaptide.engine.offline.token_file import TokenFile, TokenFileWriter
from neaptide.engine.params import FinishReason, SamplingParams
from neaptide.engine.record.block_numbers import Ranges
from neaptide.engine.record.step_log import AbortLine, AddLine, BatchLine, CancelLine, Line, Message, StepLine
from neaptide.simulation.logged_requests import LoggedRequests
from neaptide.simulation.replay_executor import Answer

FIRST_BLOCK_TOKEN_ID = 2
"""Block number b is written as tokens b + 2, so that equal numbers, and only these, are equal text."""


class ReplayMessages:
    """The messages of a log, to be asked for in its order.

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
        """By id, of the requests that were told of; an id may come again when its request has ended."""
        self._next_handle = 0
        self._row_ranks = _row_ranks(lines)
        self._row_handles: dict[str, dict[int, int]] = {}
        """By stem of the token file."""

    def message(self, line: Message) -> ToEngine:
        if isinstance(line, AddLine):
            return AddRequest(
                line.id,
                self._next_prompt(),
                _params(line.max_tokens, line.scores_prompt),
                line.tier,
                line.arrival_s,
                line.ttft_slo_s,
                line.tpot_slo_s,
            )
        if isinstance(line, BatchLine):
            return self._batch(line)
        if isinstance(line, AbortLine):
            return AbortRequest(line.ids, FinishReason(line.reason))
        if isinstance(line, CancelLine):
            return CancelBatch(line.id)
        return SetOffline(line.paused)

    def row_rank(self, tokens: TokenFile, row: int) -> int:
        """A ``RowKey``: the place that the row had in its batch by its text, which the log does not have."""
        return self._row_ranks[self._row_handles[tokens.stem][row]]

    def _batch(self, line: BatchLine) -> AddBatch:
        first = self._next_handle
        prompts = {row: self._next_prompt() for row, *_ in line.rows}
        stem = str(self._directory / str(len(self._row_handles)))
        self._row_handles[stem] = {row: first + index for index, row in enumerate(prompts)}
        with TokenFileWriter(stem) as writer:
            for row in range(max(prompts, default=-1) + 1):
                writer.append(prompts.get(row, []))
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
        )

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

    def _next_prompt(self) -> list[int]:
        """The prompt of the request that the log names next; from now on its id means this request."""
        request, answer = self.requests[self._next_handle], self.answers[self._next_handle]
        self.handles[request.request_id] = self._next_handle
        self._next_handle += 1
        prompt = list(self._tokens(request.blocks))
        return prompt + [answer.token(position) for position in range(len(prompt), request.prompt_tokens)]

    def _tokens(self, blocks: Ranges) -> Iterator[int]:
        for first, count in _pairs(blocks):
            for number in range(first, first + count):
                yield from [FIRST_BLOCK_TOKEN_ID + number] * self._block_size


def _row_ranks(lines: Sequence[Line]) -> dict[int, int]:
    """By handle of a row: its place among the rows of its batch, whatever messages they came with."""
    behind: dict[int, int] = {}
    """The row that stands behind each; that of -1 is the first of all."""
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


def _pairs(blocks: Ranges) -> Iterator[tuple[int, int]]:
    """First number and count of every run."""
    return zip(blocks[::2], blocks[1::2], strict=True)


def _params(max_tokens: int, scores_prompt: bool) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, prompt_logprobs=0 if scores_prompt else None)
