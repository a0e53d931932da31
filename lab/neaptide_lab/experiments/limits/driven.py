"""A policy's steps from a small state: the real engine, put into that state, on a virtual clock."""

from neaptide.engine.clock import VirtualClock
from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.interfaces import CostModel
from neaptide.engine.kv.draft import NO_HIT
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.engine.messages import AddRequest
from neaptide.engine.observer import EngineObserver
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.request import Request
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.step import Step
from neaptide.executors.simulated.trace_executor import END_TOKEN_ID, TraceExecutor
from neaptide_lab.experiments.limits.small_states import Choice, OfflineRow, Part, Prompt, State, Stream

START_S = 1000.0
"""The engine's time at the state's time 0."""
SAID_TOKENS = 20
"""Output of every stream until now."""
BLOCK_TOKENS = 16
NUM_BLOCKS = 8192
LIMIT_TOKENS = 1024
"""``max_tokens`` of online requests, which is all that a policy knows of their answers."""
TTFT_SLO_S = 1.0


class _Plans(EngineObserver):
    """Notes what each planned step computes, and the tokens that it finds in the cache."""

    def __init__(self) -> None:
        self.steps: list[Choice] = []
        self._started: set[str] = set()

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        plan, parts = step.plan, []
        for name, tokens, before in zip(
            plan.request_ids, plan.num_tokens.tolist(), plan.num_computed.tolist(), strict=True
        ):
            parts.append(Part(name, tokens, before if name not in self._started else 0))
            self._started.add(name)
        self.steps.append(tuple(parts))

    def knows(self, name: str) -> None:
        """The request has started before: what it has computed was not found."""
        self._started.add(name)


def driven(state: State, policy: str, num_steps: int, cost_model: CostModel, max_tokens: int) -> tuple[Choice, ...]:
    """The policy's steps, at most ``num_steps``; fewer if it runs out of work.

    Args:
        state: at its beginning; prompts and rows have no computed tokens.
        policy: a name, or ``module:Class``.
        num_steps: most steps.
        cost_model: of the device, which the policy knows.
        max_tokens: most tokens of a step.
    """
    clock, plans = VirtualClock(), _Plans()
    clock.sleep_until(START_S)
    answers = {stream.name: SAID_TOKENS + stream.tokens_left for stream in state.streams}
    answers |= {prompt.name: prompt.answer_tokens for prompt in state.prompts} | {row.name: 1 for row in state.rows}
    offline = {row.name for row in state.rows}
    executor = TraceExecutor(NUM_BLOCKS, cost_model, clock, answers.__getitem__, lambda name: name not in offline)
    scheduler = SchedulerConfig(
        policy=policy, max_num_batched_tokens=max_tokens, max_model_len=NUM_BLOCKS * BLOCK_TOKENS, ttft_slo_s=TTFT_SLO_S
    )
    config = EngineConfig(cache=CacheConfig(block_size=BLOCK_TOKENS), scheduler=scheduler)
    headroom = FixedHeadroom(NUM_BLOCKS, 0.0)
    core = EngineCore(config, executor, cost_model, headroom, clock, frozenset({END_TOKEN_ID}), [plans])
    for number, stream in enumerate(state.streams):
        _start(core, stream, number)
        plans.knows(stream.name)
    others: list[Prompt | OfflineRow] = [*state.prompts, *state.rows]
    for number, each in enumerate(others):
        core.handle(_message(each, number))
    while len(plans.steps) < num_steps and core.has_work:
        core.step()
        if not plans.steps:
            break  # it waits
    return tuple(plans.steps[:num_steps])


def _start(core: EngineCore, stream: Stream, number: int) -> None:
    """Puts a running stream into the engine."""
    prompt_tokens = stream.context + 1 - SAID_TOKENS
    first_s = START_S + stream.due_s - SAID_TOKENS * stream.tpot_s
    request = Request(
        stream.name,
        _tokens(number, prompt_tokens),
        SamplingParams(max_tokens=LIMIT_TOKENS),
        Tier.DEFAULT,
        first_s - TTFT_SLO_S,
        TTFT_SLO_S,
        stream.tpot_s,
    )
    queues, table = core.scheduler.queues, core.kv.table
    queues.add_online(request)
    queues.start(request)
    core.kv.admit(request, NO_HIT)
    core.kv.grow(request, stream.context)
    slot = request.slot
    table.tokens[slot, prompt_tokens : prompt_tokens + SAID_TOKENS] = _tokens(number, SAID_TOKENS)
    table.known[slot] = table.total[slot] = stream.context + 1
    table.computed[slot] = table.committed[slot] = stream.context
    request.first_token_s = first_s
    request.scheduled_s = first_s
    core.scheduler._untold.append(request)  # the executor learns of it with its first step


def _message(each: Prompt | OfflineRow, number: int) -> AddRequest:
    if isinstance(each, Prompt):
        tokens = _tokens(100 + number, each.tokens)
        arrival_s, tier, limit, tpot_s = START_S + each.due_s - TTFT_SLO_S, Tier.DEFAULT, LIMIT_TOKENS, each.tpot_s
    else:
        shared = _tokens(50_000 + sum(each.prefix.encode()), each.prefix_tokens)
        tokens = shared + _tokens(1000 + number, each.tokens - each.prefix_tokens)
        arrival_s, tier, limit, tpot_s = START_S, Tier.FLEX, 1, 1.0
    params = SamplingParams(max_tokens=limit)
    return AddRequest(each.name, tokens, params, tier, arrival_s, TTFT_SLO_S, tpot_s)


def _tokens(content: int, count: int) -> list[int]:
    """Tokens that no other content has."""
    return [6 + content] * count
