"""Small states of an engine, what a step makes of them, and every step that there is.

A state has streams, prompts and offline rows. All lengths are known, those of answers too. Memory does not bound a
step. Times are those of a cost model, from the beginning of the first step on, in seconds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from typing import NamedTuple

from neaptide.engine.interfaces import CostModel
from neaptide.engine.steps.plan import BatchShape


@dataclass(slots=True, frozen=True)
class Stream:
    """A running online request with output."""

    name: str
    context: int
    """Tokens in the cache."""
    due_s: float
    """When its next token is due, counted from its first token."""
    tpot_s: float
    tokens_left: int
    """Tokens of its answer to come."""

    @property
    def last_due_s(self) -> float:
        """When its last token is due: TPOT is a mean."""
        return self.due_s + (self.tokens_left - 1) * self.tpot_s


@dataclass(slots=True, frozen=True)
class Prompt:
    """An online request without output."""

    name: str
    tokens: int
    due_s: float
    """When its first token is due."""
    tpot_s: float = 0.05
    answer_tokens: int = 20
    computed: int = 0

    @property
    def tokens_left(self) -> int:
        return self.tokens - self.computed


@dataclass(slots=True, frozen=True)
class OfflineRow:
    """A row of the offline pool. It ends with its prompt."""

    name: str
    tokens: int
    prefix: str = ""
    prefix_tokens: int = 0
    """First tokens of the prompt, which all rows with this prefix share."""
    computed: int = 0
    found_tokens: int = 0
    """Tokens that it found in the cache."""

    @property
    def worth(self) -> float:
        """Tokens of the row that a computed one stands for."""
        return self.tokens / (self.tokens - self.found_tokens)


class Part(NamedTuple):
    """A request's part of a step."""

    name: str
    tokens: int
    found_tokens: int = 0
    """Tokens that a row finds in the cache as it starts."""


Choice = tuple[Part, ...]
"""A step: the scheduled requests with their tokens."""


@dataclass(frozen=True)
class State:
    """An engine's requests at ``now_s``, and what the steps so far have done."""

    streams: tuple[Stream, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    rows: tuple[OfflineRow, ...] = ()
    cached: frozenset[str] = frozenset()
    """Prefixes in the cache."""
    now_s: float = 0.0
    late: frozenset[str] = frozenset()
    """Online requests that ended late, or whose first token did."""
    online_tokens: float = 0.0
    offline_tokens: float = 0.0
    """Tokens of the rows that are done; those found in the cache count as the row is computed."""

    @cached_property
    def names(self) -> Mapping[str, Stream | Prompt | OfflineRow]:
        return {each.name: each for each in (*self.streams, *self.prompts, *self.rows)}

    def shape(self, choice: Choice) -> BatchShape:
        shape = BatchShape()
        for name, tokens, found in choice:
            each = self.names[name]
            context = each.context if isinstance(each, Stream) else each.computed + found
            shape.add(tokens, context)
        return shape

    def after(self, choice: Choice, cost_model: CostModel) -> "State":
        """The state at the end of the step."""
        end_s = self.now_s + cost_model.predict(self.shape(choice)).seconds
        parts = {part.name: part for part in choice}
        streams, prompts, rows = [], [], []
        late, cached, online, offline = set(self.late), set(self.cached), 0.0, 0.0
        for stream in self.streams:
            if stream.name not in parts:
                streams.append(stream)
                continue
            online += 1
            if stream.tokens_left == 1:
                late |= {stream.name} if end_s > stream.due_s else set()
                continue
            due_s = stream.due_s + stream.tpot_s
            left = stream.tokens_left - 1
            streams.append(replace(stream, context=stream.context + 1, due_s=due_s, tokens_left=left))
        for prompt in self.prompts:
            part = parts.get(prompt.name)
            if part is None:
                prompts.append(prompt)
                continue
            online += part.tokens
            if part.tokens < prompt.tokens_left:
                prompts.append(replace(prompt, computed=prompt.computed + part.tokens))
                continue
            late |= {prompt.name} if end_s > prompt.due_s else set()
            if prompt.answer_tokens > 1:
                due_s = end_s + prompt.tpot_s
                streams.append(Stream(prompt.name, prompt.tokens, due_s, prompt.tpot_s, prompt.answer_tokens - 1))
        for row in self.rows:
            part = parts.get(row.name)
            if part is None:
                rows.append(row)
                continue
            row = replace(row, found_tokens=row.found_tokens + part.found_tokens)
            computed = row.computed + part.found_tokens + part.tokens
            offline += part.tokens * row.worth
            if row.prefix and computed >= row.prefix_tokens:
                cached.add(row.prefix)
            if computed < row.tokens:
                rows.append(replace(row, computed=computed))
        return State(
            tuple(streams),
            tuple(prompts),
            tuple(rows),
            frozenset(cached),
            end_s,
            frozenset(late),
            self.online_tokens + online,
            self.offline_tokens + offline,
        )


class Value(NamedTuple):
    """How good a state is; the larger the better."""

    minus_late: int
    """Online requests that are late or can no longer be in time, with a minus."""
    tokens_per_s: float
    """Tokens of all work done until now, over the time."""


def value(state: State, cost_model: CostModel) -> Value:
    """The value of a state, as if what is left ran on an empty device.

    Prompts that cannot all be in time lose the fewest: the longest goes until the rest is (Moore-Hodgson). A stream is
    late if its last token is, with nothing but decodes from now on.
    """
    late = len(state.late)
    if state.streams:
        shape = BatchShape()
        for stream in state.streams:
            shape.add(1, stream.context)
        step_s = cost_model.predict(shape).seconds
        late += sum(
            state.now_s + stream.tokens_left * step_s > stream.last_due_s
            for stream in state.streams
            if stream.name not in state.late
        )
    kept_s: list[float] = []
    for prompt in sorted(state.prompts, key=lambda prompt: prompt.due_s):
        kept_s.append(cost_model.predict(BatchShape().plus(prompt.tokens_left, prompt.computed)).seconds)
        if state.now_s + sum(kept_s) > prompt.due_s:
            kept_s.remove(max(kept_s))
            late += 1
    tokens = state.online_tokens + state.offline_tokens
    return Value(-late, tokens / state.now_s if state.now_s > 0.0 else 0.0)


# ---- every step ----


def choices(state: State, unit_tokens: int, max_tokens: int) -> Iterator[Choice]:
    """Every step of the state, but for what cannot help.

    Chunks are multiples of ``unit_tokens``, or end a prompt. Of the prompts of a step at most one is left unfinished.
    The streams with the earliest deadlines decode, from none to all of them. Offline rows follow in the pool's order,
    or those first that share the next row's prefix, or those first that find theirs in the cache.
    """
    seen: set[frozenset[Part]] = set()
    by_due = sorted(state.streams, key=lambda stream: stream.due_s)
    for count in range(len(by_due), -1, -1):
        decodes = tuple(Part(stream.name, 1) for stream in by_due[:count])
        for prompts in _chunks(state.prompts, unit_tokens, max_tokens - count):
            left = max_tokens - count - sum(part.tokens for part in prompts)
            for rows in _offline(state, unit_tokens, left):
                choice = (*decodes, *prompts, *rows)
                key = frozenset(choice)
                if choice and key not in seen:
                    seen.add(key)
                    yield choice


def _chunks(prompts: Sequence[Prompt], unit_tokens: int, max_tokens: int) -> list[Choice]:
    """Prompt chunks of a step: for every order and budget, prompts filled one after the other."""
    found: dict[frozenset[Part], Choice] = {frozenset(): ()}
    total = sum(prompt.tokens_left for prompt in prompts)
    for order in permutations(prompts):
        for budget in _budgets(total, unit_tokens, max_tokens):
            parts, left = [], budget
            for prompt in order:
                if tokens := min(prompt.tokens_left, left):
                    parts.append(Part(prompt.name, tokens))
                    left -= tokens
            found.setdefault(frozenset(parts), tuple(parts))
    return list(found.values())


def _offline(state: State, unit_tokens: int, max_tokens: int) -> Iterator[Choice]:
    yield ()
    if not state.rows:
        return
    head = state.rows[0].prefix
    orders = (
        state.rows,
        tuple(sorted(state.rows, key=lambda row: row.prefix != head)),
        tuple(sorted(state.rows, key=lambda row: row.prefix not in state.cached)),
    )
    for order in dict.fromkeys(orders):
        for budget in _budgets(sum(row.tokens - row.computed for row in order), unit_tokens, max_tokens):
            yield _rows_within(state, order, budget)


def _rows_within(state: State, order: Sequence[OfflineRow], budget: int) -> Choice:
    """The first rows with that many computed tokens. A prefix that a row of the step completes is found by the next."""
    parts, cached = [], set(state.cached)
    for row in order:
        starts = not row.computed and row.prefix in cached
        found = row.prefix_tokens if starts else 0
        tokens = min(row.tokens - row.computed - found, budget)
        if tokens <= 0:
            break
        parts.append(Part(row.name, tokens, found))
        budget -= tokens
        if row.prefix and row.computed + found + tokens >= row.prefix_tokens:
            cached.add(row.prefix)
    return tuple(parts)


def _budgets(total_tokens: int, unit_tokens: int, max_tokens: int) -> Iterator[int]:
    """Multiples of the unit below the limit, and the limit: all tokens, or as many as a step has left."""
    most = min(total_tokens, max_tokens)
    if most > 0:
        yield from range(unit_tokens, most, unit_tokens)
        yield most


# ---- the best plans ----


class Plan(NamedTuple):
    """Steps, and what they lead to."""

    value: Value
    steps: tuple[Choice, ...]
    end: State


def best_plan(state: State, num_steps: int, cost_model: CostModel, unit_tokens: int, max_tokens: int) -> Plan:
    """The best of all sequences of steps, by exhaustive search. Of equal ones the first counts."""
    if num_steps == 0 or not (state.streams or state.prompts or state.rows):
        return Plan(value(state, cost_model), (), state)
    best: Plan | None = None
    for choice in choices(state, unit_tokens, max_tokens):
        rest = best_plan(state.after(choice, cost_model), num_steps - 1, cost_model, unit_tokens, max_tokens)
        if best is None or rest.value > best.value:
            best = Plan(rest.value, (choice, *rest.steps), rest.end)
    assert best is not None
    return best


def greedy_plan(
    state: State, num_steps: int, cost_model: CostModel, unit_tokens: int, max_tokens: int, look_ahead: int = 1
) -> Plan:
    """Steps chosen one after the other, each as the first of the best ``look_ahead`` steps."""
    steps: list[Choice] = []
    for _ in range(num_steps):
        found = best_plan(state, look_ahead, cost_model, unit_tokens, max_tokens)
        if not found.steps:
            break
        steps.append(found.steps[0])
        state = state.after(found.steps[0], cost_model)
    return Plan(value(state, cost_model), tuple(steps), state)
