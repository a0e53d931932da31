"""Runs one HTTP request: engine requests, deltas, metrics, and the abort when the client disconnects."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from neaptide.engine.messages import AddRequest, RequestOutput
from neaptide.engine.params import FinishReason, Tier, request_class
from neaptide.server.context import ServingContext
from neaptide.server.engine_client.backlog import SlowReaderError
from neaptide.server.engine_client.client import EngineUnavailableError
from neaptide.server.http.auth import Principal, principal_of
from neaptide.server.http.body_threads import LONG_BYTES
from neaptide.server.http.errors import (
    ApiError,
    OverloadedError,
    RequestTimeoutError,
    engine_unavailable,
)
from neaptide.server.http.jsonbody import parse_aside, read_json
from neaptide.server.http.middleware import ARRIVAL_S
from neaptide.server.http.own_waits import OWN_WAIT, OwnWait
from neaptide.server.http.patience import first_within, patience_s
from neaptide.server.http.refusals import Cost
from neaptide.server.http.sse import EventStream, unless_disconnected
from neaptide.server.limits.limiter import Charge, RateLimiter
from neaptide.server.observe.metrics import ServerMetrics
from neaptide.server.observe.request_log import RequestRecord
from neaptide.server.observe.timing import ChoiceTiming, RequestTiming
from neaptide.server.openai.endpoints import RESPONSES
from neaptide.server.openai.prepare import Prepared, asked_tier, prepare
from neaptide.server.openai.respond import Delta, ResponseAssembler, response_id
from neaptide.server.openai.responses.events import ResponseEvents
from neaptide.server.openai.stream import ChunkShaper
from neaptide.server.structured.constraints import ensure_held, is_known_to_hold

_FAULTS_OF_OURS = ("server_error", "shed")
"""Outcomes for which no key is charged."""
INLINE_LOGPROBS = 64
"""Most scored tokens that are formatted on the event loop."""
GRAMMAR_WAIT_S = 10.0
"""Longest wait for the compilation of a grammar, which takes turns between keys."""


async def answer(request: Request, endpoint: str) -> Response:
    """Handles a generation request: body, checks, engine, reply."""
    context: ServingContext = request.app.state.context
    metrics: ServerMetrics = request.app.state.metrics
    request_id = str(request.scope.get("state", {}).get("request_id", ""))
    principal = principal_of(request)
    tier = principal.tier
    limiter: RateLimiter = request.app.state.limiter
    cost: Cost | None = None
    try:
        principal.require(Tier.FLEX)
        cost = Cost()
        limiter.check(principal)
        raw = await read_json(request)
        state = request.scope.get("state", {})
        arrival_s = state.get(ARRIVAL_S, context.clock())
        own_wait: OwnWait | None = state.get(OWN_WAIT)
        if own_wait is not None and len(raw) > LONG_BYTES:
            # Long bodies wait for each other, which says nothing about short chats.
            own_wait.leave()
            own_wait = None
        body = await parse_aside(raw, context.bodies, principal.share, cost)
        context.check_open()
        tier = asked_tier(body, principal.tier)
        # A request without room is refused before any work is done; ``Generation`` enters later.
        context.admission.check(request_class(tier), principal.share)
        work = partial(prepare, endpoint, body, context, principal.tier)
        prepared = await context.bodies.run(cost.of(work), len(raw), principal.share)
        if prepared.constraint is not None and not is_known_to_hold(prepared.constraint, context):
            if own_wait is not None:
                own_wait.leave()  # Grammars wait for each other, too.
                own_wait = None
            async with context.grammar_turns.turn(principal.share, GRAMMAR_WAIT_S):
                await anyio.to_thread.run_sync(cost.of(partial(ensure_held, prepared.constraint, context)))
        tier = prepared.tier
        principal.require(tier)
        if not context.client.is_ready:
            raise engine_unavailable()
        charge = await limiter.admit(principal, prepared.num_prompt_tokens, prepared.reserved_tokens)
    except ApiError as error:
        metrics.on_refused(_refusal(request_id, principal, endpoint, tier, context.model_id, error))
        if cost is not None and _is_callers(error):
            now_s = asyncio.get_running_loop().time()
            await asyncio.sleep(context.refusals.wait_s(principal.key_id, cost.seconds, now_s))
        raise
    # Comments keep a stream's client connected; a client that waits for a whole reply gets nothing until then.
    is_patient = prepared.stream or tier is not Tier.FLEX
    generation = Generation(
        prepared,
        principal,
        metrics,
        charge,
        request_id=request_id,
        arrival_s=arrival_s,
        own_wait=own_wait,
        first_token_within_s=None if is_patient else patience_s(request.headers, context.flex_wait_s),
    )
    if prepared.stream:
        stream = EventStream(generation.events(), context.keep_alive_s, charge.headers, charge.end)
        generation.write_past(stream)
        return stream
    try:
        reply = await unless_disconnected(request.receive, generation.complete())
    finally:
        charge.end()
    return Response(reply, headers=charge.headers, media_type="application/json")


def _is_callers(error: ApiError) -> bool:
    """Whether the request is at fault, not the load."""
    return error.status < 500 and not error.is_passing


def _refusal(
    request_id: str, principal: Principal, endpoint: str, tier: Tier, model: str, error: ApiError
) -> RequestRecord:
    return RequestRecord(
        request_id=request_id,
        key=principal.key_id,
        endpoint=endpoint,
        tier=tier.value,
        model=model,
        outcome=_outcome_of(error),
        error_code=error.code,
    )


def _outcome_of(error: ApiError) -> str:
    if isinstance(error, OverloadedError):
        return "shed"
    return "server_error" if error.status >= 500 else "client_error"


class Generation:
    """The engine requests of one HTTP request, one per choice."""

    def __init__(
        self,
        prepared: Prepared,
        principal: Principal,
        metrics: ServerMetrics,
        charge: Charge,
        *,
        request_id: str,
        arrival_s: float,
        own_wait: OwnWait | None = None,
        first_token_within_s: float | None = None,
    ) -> None:
        self.assembler = ResponseAssembler.of(prepared)
        self._prepared = prepared
        self._context = prepared.context
        self._principal = principal
        self._metrics = metrics
        self._charge = charge
        self._request_id = request_id
        self._own_wait = own_wait
        """Until it is noted."""
        self._first_token_within_s = first_token_within_s
        # The engine's ids are always ours: a caller's id must not be able to name another caller's request.
        self._id = uuid.uuid4().hex
        self.timing = RequestTiming(arrival_s, [ChoiceTiming() for _ in range(prepared.num_choices)])
        self._counted_prompts: set[int] = set()
        """Numbers of the prompts whose tokens have been counted; choices of one prompt share it."""
        self._shaper = _shaper(self.assembler, prepared, response_id(prepared.form, self._id))
        self._stream: EventStream | None = None
        self._failure: Exception | None = None
        """Fault in ``_take_now``, for the task of the request."""

    def write_past(self, stream: EventStream) -> None:
        """Makes tokens go to the connection as they come, where nothing else is to be done about them.

        A task that wakes for every token would take as long as all other work on it.
        """
        form = self._prepared.form
        # A stop string may end a choice, and tables of log-probabilities may be long.
        if self._prepared.num_choices == 1 and not form.stop and not form.wants_logprobs:
            self._stream = stream

    async def complete(self) -> bytes:
        """The encoded body. Raises ApiError or EngineUnavailableError."""
        async with aclosing(self._deltas()) as deltas:
            async for index, output, _ in deltas:
                self._note_delivered(index, output)
        tokens = sum(len(choice.tokens) for choice in self.assembler.choices)
        return await self._aside(tokens, self._encode_body)

    def _encode_body(self) -> bytes:
        return self.assembler.encoded(self._id, self.timing.as_metrics())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Encoded events of a streamed reply, without the final ``[DONE]``."""
        async with aclosing(self._deltas()) as deltas:
            async for index, output, delta in deltas:
                data = await self._aside(len(delta.tokens), partial(self._shaper.encode, delta))
                if data:
                    yield data
                self._note_delivered(index, output)
        if last := self._shaper.end(self.timing.as_metrics()):
            yield last

    async def _aside(self, tokens: int, encode: Callable[[], bytes]) -> bytes:
        """Encodes; long tables of log-probabilities in a thread, so that other streams continue."""
        if tokens <= INLINE_LOGPROBS:
            return encode()
        return await anyio.to_thread.run_sync(encode, limiter=self._context.shape_limiter)

    async def _deltas(self) -> AsyncGenerator[tuple[int, RequestOutput, Delta], None]:
        """Runs the request with admission and metrics. Closing the generator early aborts it in the engine.

        Yields each output with the index of its choice and what it adds.
        """
        tier = self._prepared.tier
        admission, choices = self._context.admission, self._prepared.num_choices
        try:
            await admission.admit(request_class(tier), self._principal.share, choices)
        except OverloadedError as error:
            form = self._prepared.form
            refusal = _refusal(self._request_id, self._principal, form.endpoint, tier, form.model, error)
            self._metrics.on_refused(refusal)
            self._charge.end(counts=False)
            raise
        self._metrics.on_begun(tier, self.timing)
        outcome, code = "aborted", None
        try:
            async with aclosing(first_within(self._outputs(), self._first_token_within_s)) as outputs:
                async for index, output in outputs:
                    if self._failure is not None:
                        raise self._failure
                    delta = self._take(index, output)
                    if self.assembler.error is not None:
                        raise self.assembler.error
                    if self.assembler.finished:
                        outcome = "ok"
                    yield index, output, delta
                    if self.assembler.finished:
                        break
        except SlowReaderError:
            code = "reader_too_slow"
            raise RequestTimeoutError("The reply was not read fast enough.", code=code) from None
        except ApiError as error:
            outcome, code = _outcome_of(error), error.code
            raise
        except EngineUnavailableError:
            outcome, code = "server_error", "engine_unavailable"
            raise
        except Exception:
            outcome, code = "server_error", "internal_error"
            raise
        finally:
            admission.leave(request_class(tier), self._principal.share, choices)
            answer_tokens = self.assembler.usage()["completion_tokens"]
            self._charge.end(counts=outcome not in _FAULTS_OF_OURS, answer_tokens=answer_tokens)
            self._metrics.on_finished(self._record(outcome, code), self._prepared, self.timing)

    def _take(self, index: int, output: RequestOutput) -> Delta:
        self._count_tokens(index, output)
        self._charge.on_tokens(len(output.new_token_ids))
        was_finished = self.assembler.choices[index].finished
        delta = self.assembler.feed(index, output)
        if self.assembler.choices[index].stop_hit and not was_finished and output.finish_reason is None:
            self._context.client.abort([self._engine_id(index)], FinishReason.STOP)
        return delta

    def _count_tokens(self, index: int, output: RequestOutput) -> None:
        prompt = index // self._prepared.form.n
        prompt_tokens = 0 if prompt in self._counted_prompts else output.num_prompt_tokens
        if prompt_tokens:
            self._counted_prompts.add(prompt)
        self._metrics.on_tokens(self._prepared.tier, prompt_tokens, output.num_cached_tokens, len(output.new_token_ids))

    def _note_delivered(self, index: int, output: RequestOutput) -> None:
        """Notes an output whose text has been written to the connection, or has none."""
        choice = self.timing.choices[index]
        gap_s = choice.on_output(output, self._context.clock())
        if gap_s is not None:
            self._metrics.on_gap(self._prepared.tier, gap_s)
        elif self._own_wait is not None and choice.first_s is not None:
            self._own_wait.note(choice.first_s, choice.engine_s)
            self._own_wait = None

    def _take_now(self, output: RequestOutput) -> bool:
        """Writes the text of an output while the task waits for the next one. Returns False if the task must do it.

        Never raises: this runs where the outputs of all requests are handled.
        """
        if self._stream is None or output.finish_reason is not None:
            return False
        connection = self._stream.output_now()
        if connection is None:
            return False
        try:
            if data := self._shaper.encode(self._take(0, output)):
                connection.write_now(data)
            self._note_delivered(0, output)
        except Exception as failure:
            self._failure = failure
            return False
        return True

    def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        return self._one() if self._prepared.num_choices == 1 else self._many()

    async def _one(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        async with aclosing(self._generate(0)) as outputs:
            async for output in outputs:
                yield 0, output

    async def _many(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of all choices, in order of arrival."""
        # Unread outputs wait, and are merged, at their source.
        queue: asyncio.Queue[tuple[int, RequestOutput] | Exception] = asyncio.Queue(self._prepared.num_choices)

        async def pump(index: int) -> None:
            try:
                async with aclosing(self._generate(index)) as outputs:
                    async for output in outputs:
                        await queue.put((index, output))
            except Exception as error:
                await queue.put(error)

        pumps = [asyncio.ensure_future(pump(index)) for index in range(self._prepared.num_choices)]
        try:
            # The consumer stops reading when the last choice has ended.
            while True:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def _generate(self, index: int) -> AsyncGenerator[RequestOutput, None]:
        prepared = self._prepared
        request = AddRequest(
            request_id=self._engine_id(index),
            prompt_token_ids=prepared.prompts[index // prepared.form.n],
            params=prepared.params_for(index),
            tier=prepared.tier,
            arrival_s=self.timing.arrival_s,
            ttft_slo_s=prepared.ttft_slo_s,
            tpot_slo_s=prepared.tpot_slo_s,
            salt=self._principal.salt_for(prepared.cache_salt),
            share=self._principal.share,
        )
        self.timing.choices[index].sent_s = self._context.clock()
        if self._own_wait is not None:
            self._own_wait.leave()
        # It returns an async generator; its declared type says only that it can be iterated.
        return self._context.client.generate(request, self._take_now)

    def _engine_id(self, index: int) -> str:
        return f"{self._id}-{index}"

    def _record(self, outcome: str, code: str | None) -> RequestRecord:
        prepared, timing, choices = self._prepared, self.timing, self.assembler.choices
        usage = self.assembler.usage()
        return RequestRecord(
            request_id=self._request_id,
            key=self._principal.key_id,
            engine_id=self._id,
            endpoint=prepared.form.endpoint,
            tier=prepared.tier.value,
            model=prepared.form.model,
            outcome=outcome,
            stream=prepared.stream,
            choices=prepared.num_choices,
            finish_reasons=tuple(choice.finish_reason or "none" for choice in choices),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            completion_tokens=usage["completion_tokens"],
            queue_ms=_ms(timing.queue_s),
            ttft_ms=_ms(timing.ttft_s),
            e2e_ms=_ms(self._context.clock() - timing.arrival_s),
            preemptions=sum(choice.num_preemptions for choice in choices),
            error_code=code,
        )


def _shaper(assembler: ResponseAssembler, prepared: Prepared, reply_id: str) -> ChunkShaper | ResponseEvents:
    is_response = prepared.form.endpoint == RESPONSES
    return ResponseEvents(assembler, reply_id) if is_response else ChunkShaper(assembler, prepared, reply_id)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
