"""Outputs of one request that the server has not read yet, in bounded memory."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from neaptide.engine.messages import RequestOutput

MAX_BACKLOG_VALUES = 4096
"""Most token ids and log-probabilities that wait for a reader; about 256 KiB."""

_End = TypeVar("_End")


class SlowReaderError(Exception):
    """The reader was too slow; the outputs that it has not read are lost."""


class OutputBacklog(asyncio.Queue[RequestOutput | _End], Generic[_End]):
    """Queue of outputs of one request, and of ends of another type. Waiting outputs are merged into one.

    So a slow reader gets fewer and larger pieces, and only its tokens take memory. Beyond ``MAX_BACKLOG_VALUES`` the
    queue is ``overflowed`` and takes no more.

    Args:
        take_now: gets an output while the reader waits for one, and says whether it has handled it. Then no task is
            woken for it.
    """

    def __init__(self, take_now: Callable[[RequestOutput], bool] | None = None) -> None:
        super().__init__()
        self.overflowed = False
        self._take_now = take_now
        self._is_awaited = False
        self._waiting: RequestOutput | None = None
        self._num_values = 0

    def give(self, output: RequestOutput, *, is_last: bool = True) -> None:
        """Passes an output on: at once if the reader waits for it, else through the queue.

        Args:
            is_last: whether no further output is known to follow. Outputs that come together are merged in the queue.
        """
        is_idle = is_last and self._is_awaited and self.empty()
        if self._take_now is None or not is_idle or not self._take_now(output):
            self.put_nowait(output)

    async def get(self) -> RequestOutput | _End:
        self._is_awaited = True
        try:
            return await super().get()
        finally:
            self._is_awaited = False

    def _put(self, item: RequestOutput | _End) -> None:
        if not isinstance(item, RequestOutput):
            self._waiting = None
            super()._put(item)
        elif self._waiting is None:
            self._waiting, self._num_values = item, 0
            super()._put(item)
        elif not self.overflowed:
            self._num_values += len(item.new_token_ids) + sum(len(scores.top_ids) for scores in item.logprobs or ())
            self.overflowed = self._num_values > MAX_BACKLOG_VALUES
            _merge(self._waiting, item)

    def _get(self) -> RequestOutput | _End:
        item = super()._get()
        if item is self._waiting:
            self._waiting = None
        return item


def _merge(waiting: RequestOutput, later: RequestOutput) -> None:
    waiting.new_token_ids += later.new_token_ids
    if waiting.logprobs is None:
        waiting.logprobs = later.logprobs
    else:
        waiting.logprobs += later.logprobs or ()
    waiting.prompt_logprobs = waiting.prompt_logprobs or later.prompt_logprobs
    waiting.finish_reason = later.finish_reason
    waiting.stop_token_id = later.stop_token_id
    waiting.error = later.error
    waiting.num_preemptions = later.num_preemptions
