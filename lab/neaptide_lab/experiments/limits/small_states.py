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
    """Tokens that are computed, or were found in the cache."""


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
    offline_tokens: int = 0
    """Computed tokens of rows."""

    @cached_property
    def names(self) -> Mapping[str, Stream | Prompt | OfflineRow]:
        everyone: list[Stream | Prompt | OfflineRow] = [*self.streams, *self.prompts, *self.rows]
        return {each.name: each for each in everyone}

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
        late, cached, offline = set(self.late), set(self.cached), 0
        for stream in self.streams:
            if stream.name not in parts:
                streams.append(stream)
                continue
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
            computed = row.computed + part.found_tokens + part.tokens
            offline += part.tokens
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
            self.offline_tokens + offline,
        )


class Value(NamedTuple):
    """How good a state is; the larger the better."""

    minus_late: int
    """Online requests that are late or can no longer be in time, with a minus."""
    minus_done_s: float
    """Earliest time at which all work could be done, with a minus."""


class Judge:
    """Values states by what is left of them.

    Late are those that are, and those that would be if what is left ran on an empty device. Prompts that cannot all be
    in time lose the fewest: the longest goes until the rest is (Moore-Hodgson). A stream is late if its last token is,
    with nothing but decodes from now on.

    All work is done at the earliest when the device has computed every token, and when the longest answer has had a
    step for each of its tokens. A step that wastes neither moves this time by nothing. So plans of different lengths,
    and with different work, can be compared.

    Args:
        cost_model: of the device.
    """

    def __init__(self, cost_model: CostModel) -> None:
        self.cost_model = cost_model
        read = [self._seconds((1, context)) for context in (1, _PROBE_CONTEXT + 1)]
        self._kv_token_s = (read[1] - read[0]) / _PROBE_CONTEXT
        whole, double, behind = (
            self._seconds(chunk)
            for chunk in ((_PROBE_TOKENS, 0), (2 * _PROBE_TOKENS, 0), (_PROBE_TOKENS, _PROBE_CONTEXT))
        )
        pairs = _PROBE_TOKENS * _PROBE_CONTEXT
        self._pair_s = max(behind - whole - _PROBE_CONTEXT * self._kv_token_s, 0.0) / pairs
        more_pairs = _pairs(2 * _PROBE_TOKENS, 0) - _pairs(_PROBE_TOKENS, 0)
        self._token_s = (double - whole - more_pairs * self._pair_s) / _PROBE_TOKENS

    def value(self, state: State) -> Value:
        return Value(-self._late(state), -round(self._done_s(state), _DIGITS))

    def _seconds(self, *chunks: tuple[int, int]) -> float:
        """Time of a step with these (tokens, context)."""
        shape = BatchShape()
        for chunk in chunks:
            shape.add(*chunk)
        return self.cost_model.predict(shape).seconds

    def _late(self, state: State) -> int:
        late = len(state.late)
        if state.streams:
            step_s = self._seconds(*((1, stream.context) for stream in state.streams))
            late += sum(
                state.now_s + stream.tokens_left * step_s > stream.last_due_s
                for stream in state.streams
                if stream.name not in state.late
            )
        kept_s: list[float] = []
        for prompt in sorted(state.prompts, key=lambda prompt: prompt.due_s):
            kept_s.append(self._seconds((prompt.tokens_left, prompt.computed)))
            if state.now_s + sum(kept_s) > prompt.due_s:
                kept_s.remove(max(kept_s))
                late += 1
        return late

    def _done_s(self, state: State) -> float:
        answers = [stream.tokens_left for stream in state.streams]
        work_s = sum(self._decodes_s(stream.context, stream.tokens_left) for stream in state.streams)
        for prompt in state.prompts:
            answers.append(prompt.answer_tokens)
            work_s += self._chunk_s(prompt.tokens_left, prompt.computed)
            work_s += self._decodes_s(prompt.tokens, prompt.answer_tokens - 1)
        cached = set(state.cached)
        for row in state.rows:
            found = row.prefix_tokens if row.prefix in cached and not row.computed else 0
            work_s += self._chunk_s(row.tokens - row.computed - found, row.computed + found)
            cached.add(row.prefix)
        return state.now_s + max(work_s, max(answers, default=0) * self._seconds((1, 1)))

    def _chunk_s(self, tokens: int, context: int) -> float:
        return self._token_s * tokens + self._pair_s * _pairs(tokens, context) + self._kv_token_s * context

    def _decodes_s(self, context: int, count: int) -> float:
        return count * (self._token_s + self._kv_token_s * (context + count / 2))


_DIGITS = 6
"""Decimal places of a time in seconds that count: plans that differ by less are equal."""
_PROBE_TOKENS, _PROBE_CONTEXT = 1024, 4096
"""A chunk and a context from whose step times the prices of work are taken."""


def _pairs(tokens: int, context: int) -> int:
    return tokens * context + tokens * (tokens + 1) // 2


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


def best_plan(state: State, num_steps: int, judge: Judge, unit_tokens: int, max_tokens: int) -> Plan:
    """The best of all sequences of steps, by exhaustive search. Of equal ones the one with the most tokens counts."""
    if num_steps == 0 or not (state.streams or state.prompts or state.rows):
        return Plan(judge.value(state), (), state)
    best, most_tokens = None, 0
    for choice in choices(state, unit_tokens, max_tokens):
        rest = best_plan(state.after(choice, judge.cost_model), num_steps - 1, judge, unit_tokens, max_tokens)
        steps = (choice, *rest.steps)
        tokens = sum(part.tokens for step in steps for part in step)
        if best is None or (rest.value, tokens) > (best.value, most_tokens):
            best, most_tokens = Plan(rest.value, steps, rest.end), tokens
    assert best is not None
    return best


def greedy_plan(
    state: State, num_steps: int, judge: Judge, unit_tokens: int, max_tokens: int, look_ahead: int = 1
) -> Plan:
    """Steps chosen one after the other, each as the first of the best ``look_ahead`` steps."""
    steps: list[Choice] = []
    for _ in range(num_steps):
        found = best_plan(state, look_ahead, judge, unit_tokens, max_tokens)
        if not found.steps:
            break
        steps.append(found.steps[0])
        state = state.after(found.steps[0], judge.cost_model)
    return Plan(judge.value(state), tuple(steps), state)
