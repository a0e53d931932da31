"""An engine without a model: answers on the event loop with tokens that depend on (prompt, seed, position) only."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence

import msgspec

from neaptide.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineReady,
    RequestOutput,
    Room,
    StepOutputs,
    StepStats,
    TellRoom,
    ToEngine,
    TokenLogprobs,
    from_engine_decoder,
    from_engine_encoder,
    to_engine_decoder,
    to_engine_encoder,
)
from neaptide.engine.params import FinishReason
from neaptide.server.engine_client.client import EngineClient

FIRST_PLAIN, LAST_PLAIN = 6, 402
"""Token ids of the small model's vocabulary that are no special tokens."""


def ready(vocab_size: int = 416, max_model_len: int = 8192) -> EngineReady:
    return EngineReady("model", "cpu", "float32", vocab_size, max_model_len, 16, 64, [5])


def hashed_token(prompt: Sequence[int], seed: int | None, position: int) -> int:
    digest = hashlib.sha256(repr((list(prompt), seed, position)).encode()).digest()
    return FIRST_PLAIN + int.from_bytes(digest[:4], "big") % (LAST_PLAIN - FIRST_PLAIN + 1)


def some_stats(**changes: float) -> StepStats:
    values: dict[str, float] = dict.fromkeys(StepStats.__struct_fields__, 0)
    values |= {"duration_s": 0.01, "predicted_s": 0.011, "blocks_free": 60, "blocks_online": 4}
    return msgspec.convert(list((values | changes).values()), StepStats, strict=False)


class FakeEngine:
    """An ``EngineLink``. What it should do is set on its attributes before a request comes."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.received: list[ToEngine] = []
        self.script: list[int] | None = None
        """Output of every request; ends with end-of-sequence unless max_tokens cuts it."""
        self.tokens_per_output = 1
        self.delay_s = 0.0
        self.cached_tokens = 0
        self.fail_after: int | None = None
        """Ends with ERROR after so many tokens ..."""
        self.fail_reason = "secret"
        """... for this reason."""
        self.die_after: int | None = None
        """The whole engine goes away after so many tokens."""
        self.room: Room | None = Room(0.75, 0.001, b"12345678")
        """What it says of its room; None: nothing."""
        self.released = asyncio.Event()
        self.released.set()
        """Cleared: requests wait before their first token."""
        self.token_at: Callable[[Sequence[int], int | None, int], int] = hashed_token
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._step = 0

    # ---- what tests look at ----

    @property
    def requests(self) -> list[AddRequest]:
        return [message for message in self.received if isinstance(message, AddRequest)]

    @property
    def aborts(self) -> list[tuple[str, FinishReason]]:
        found = [message for message in self.received if isinstance(message, AbortRequest)]
        return [(request_id, message.reason) for message in found for request_id in message.request_ids]

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    # ---- EngineLink ----

    def attach(self) -> None:
        self.client.attach(self, ready())

    def send(self, message: ToEngine) -> None:
        message = to_engine_decoder.decode(to_engine_encoder.encode(message))
        self.received.append(message)
        if isinstance(message, AddRequest):
            task = asyncio.get_running_loop().create_task(self._run(message))
            self._tasks[message.request_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(message.request_id, None))
        elif isinstance(message, TellRoom) and self.room is not None:
            cached = self.room.cached if message.with_cached else None
            room = msgspec.structs.replace(self.room, cached=cached)
            asyncio.get_running_loop().call_soon(self.client.on_message, StepOutputs([], [], room=room))
        elif isinstance(message, AbortRequest):
            for request_id in message.request_ids:
                task_or_none = self._tasks.pop(request_id, None)
                if task_or_none is not None:
                    task_or_none.cancel()
                    self._emit(RequestOutput(request_id, [], finish_reason=message.reason))

    def die(self, *, in_step: bool = True) -> None:
        """The engine goes away, in a step with all its requests or between steps."""
        self.client.detach(list(self._tasks) if in_step else ())
        for task in list(self._tasks.values()):
            task.cancel()

    def emit_stats(self, **changes: float) -> None:
        self.client.on_message(StepOutputs([], [some_stats(**changes)]))

    # ---- generation ----

    async def _run(self, request: AddRequest) -> None:
        try:
            await self._answer(request)
        except Exception:
            # A mistake in here must fail the test, not leave its client waiting.
            self.die()
            raise

    async def _answer(self, request: AddRequest) -> None:
        await self.released.wait()
        tokens, ends_early = self._plan(request)
        prompt_logprobs = self._prompt_logprobs(request)
        sent = 0
        while True:
            await asyncio.sleep(self.delay_s)
            if self.die_after is not None and sent >= self.die_after:
                self.die()
                return
            if self.fail_after is not None and sent >= self.fail_after:
                self._emit(
                    RequestOutput(request.request_id, [], finish_reason=FinishReason.ERROR, error=self.fail_reason)
                )
                return
            new = tokens[sent : sent + self.tokens_per_output]
            sent += len(new)
            output = self._output(request, new)
            output.prompt_logprobs, prompt_logprobs = prompt_logprobs, None
            if sent >= len(tokens):
                output.finish_reason = FinishReason.STOP if ends_early else FinishReason.LENGTH
                output.stop_token_id = 5 if ends_early else None
                self._emit(output)
                return
            self._emit(output)

    def _plan(self, request: AddRequest) -> tuple[list[int], bool]:
        limit = request.params.max_tokens
        if self.script is not None:
            return self.script[:limit], len(self.script) < limit
        return [self.token_at(request.prompt_token_ids, request.params.seed, i) for i in range(limit)], False

    def _output(self, request: AddRequest, new: list[int]) -> RequestOutput:
        scheduled_s = request.arrival_s + 0.001
        output = RequestOutput(request.request_id, new, scheduled_s=scheduled_s, first_token_s=scheduled_s + 0.001)
        output.num_prompt_tokens = len(request.prompt_token_ids)
        output.num_cached_tokens = self.cached_tokens
        if request.params.logprobs is not None:
            output.logprobs = [_logprobs(token, request.params.logprobs) for token in new]
        return output

    def _prompt_logprobs(self, request: AddRequest) -> list[TokenLogprobs] | None:
        k = request.params.prompt_logprobs
        return None if k is None else [_logprobs(token, k) for token in request.prompt_token_ids[1:]]

    def _emit(self, output: RequestOutput) -> None:
        self._step += 1
        message = StepOutputs([output], [some_stats(step=self._step)])
        self.client.on_message(from_engine_decoder.decode(from_engine_encoder.encode(message)))


def _logprobs(token: int, k: int) -> TokenLogprobs:
    """The chosen token is the best one; the next ids follow it."""
    tops = [token, *(FIRST_PLAIN + (token + i) % 300 for i in range(1, k))][:k]
    return TokenLogprobs(token, -0.5, tops, [-0.5 - i for i in range(len(tops))])
