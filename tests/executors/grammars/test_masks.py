"""Masks beside steps: what is shared, what waits for whom, and what is held in memory."""

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from neaptide.engine.params import GRAMMAR_ERROR
from neaptide.executors.grammar_masks import NICENESS, GrammarMasks
from neaptide.executors.grammar_places import BASE_BYTES, Follower, GrammarPlace, GrammarPlaces
from neaptide.executors.grammar_pool import MAKER, MatcherPool
from neaptide.executors.step_mask import Constrained, Patience, StepMask
from neaptide.models.grammars import TOO_SLOW, GrammarError, Grammars
from neaptide.server.structured.grammars import answer_grammar, choice_part, schema_part
from neaptide.server.text.tokenizer import Tokenizer
from tests.executors.engine_run import EOS_TOKEN_ID
from tests.executors.grammars.test_grammars import VOCAB_SIZE, model, tokenizer
from tests.patience import PATIENCE_S

__all__ = ["model", "tokenizer"]  # fixtures

NOW = Patience(0.0, False, 0.0)
OBJECT = answer_grammar(schema_part({"type": "object", "properties": {"name": {"type": "string"}}}))
SLOW = 'start: "slow"'


@pytest.fixture
def masks(model: Path) -> Iterator[GrammarMasks]:
    masks = GrammarMasks(model, VOCAB_SIZE, [EOS_TOKEN_ID])
    yield masks
    masks.close()


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Outputs of which a mask was computed."""
    finish, outputs = GrammarMasks._finish, []

    def noted(masks: GrammarMasks, place: GrammarPlace, *rest: object) -> None:
        outputs.append(place.output.tobytes())
        finish(masks, place, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(GrammarMasks, "_finish", noted)
    return outputs


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What compiles a grammar that begins with ``SLOW`` waits for it."""
    compile_, gate = Grammars.compile, threading.Event()

    def slow(grammars: Grammars, grammar: str) -> object:
        if grammar.startswith(SLOW):
            assert gate.wait(PATIENCE_S)
        return compile_(grammars, grammar)

    monkeypatch.setattr(Grammars, "compile", slow)
    yield gate
    gate.set()


class Requests:
    """Some with one grammar, each with an output of its own."""

    def __init__(self, masks: GrammarMasks, grammar: str, count: int, name: str = "") -> None:
        self.masks = masks
        self.followers = [Follower(grammar) for _ in range(count)]
        self.outputs: list[list[int]] = [[] for _ in range(count)]
        self.names = [f"{name}{index}" for index in range(count)]

    def constrained(self) -> list[Constrained]:
        return [
            Constrained(name, follower, np.array(output, np.int32), None)
            for name, follower, output in zip(self.names, self.followers, self.outputs, strict=True)
        ]

    def fill(self) -> StepMask:
        return self.masks.fill(self.constrained()).collect()

    def step(self, pick: Callable[[int, list[int]], int]) -> None:
        """Each puts out the token that ``pick`` makes of its number and of what is allowed."""
        mask = self.fill()
        assert (mask.errors, mask.late) == ({}, {})
        for index, output in enumerate(self.outputs):
            output.append(pick(index, allowed(mask, index)))

    def leave(self) -> None:
        for follower in self.followers:
            self.masks.leave(follower)


def allowed(mask: StepMask, index: int) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.bits[index].view(np.uint8), bitorder="little")).tolist()


def first_text(index: int, tokens: list[int]) -> int:
    return next((token for token in tokens if token != EOS_TOKEN_ID), EOS_TOKEN_ID)


def test_requests_at_the_same_place_share_one_mask(masks: GrammarMasks, computed: list[bytes]) -> None:
    requests = Requests(masks, OBJECT, 128)
    for _ in range(4):
        requests.step(first_text)
    assert len(computed) == len(set(computed)) == 4


def test_requests_that_part_and_meet_again_have_the_masks_of_their_own_outputs(masks: GrammarMasks) -> None:
    grammar = 'start: ("a" | "b") ("c" | "d") "e"'
    requests = Requests(masks, grammar, 4)
    for pick in (lambda i, tokens: tokens[i % 2], lambda i, tokens: tokens[i // 2]):
        requests.step(pick)
    together = [allowed(requests.fill(), index) for index in range(4)]
    alone = [Requests(masks, grammar, 1) for _ in range(4)]
    for one, output in zip(alone, requests.outputs, strict=True):
        one.outputs = [output]
    assert len({tuple(output) for output in requests.outputs}) == 4
    assert together == [allowed(one.fill(), 0) for one in alone]


def test_a_long_literal_takes_no_more_memory_than_a_short_one(masks: GrammarMasks) -> None:
    """With text forced ahead, each of these took 22 MB and was kept."""
    process = psutil.Process()
    Requests(masks, answer_grammar(choice_part(["warm"])), 1).step(first_text)
    before = process.memory_info().rss
    choices = [answer_grammar(choice_part([f"{number} " + "x" * 60_000])) for number in range(24)]
    all_requests = [Requests(masks, choice, 1) for choice in choices]
    for requests in all_requests:
        for _ in range(3):
            requests.step(first_text)
    assert process.memory_info().rss - before < 120e6


def test_a_long_literal_allows_the_tokens_that_it_begins_with(masks: GrammarMasks) -> None:
    requests = Requests(masks, 'start: "' + "x" * 60_000 + '"', 1)
    for _ in range(3):
        assert allowed(requests.fill(), 0) == allowed(Requests(masks, 'start: "xxxxxxxxxxxxxxxxx"', 1).fill(), 0)
        requests.outputs[0] += [allowed(requests.fill(), 0)[0]]


def test_a_quick_mask_does_not_wait_for_a_slow_one(masks: GrammarMasks, gate: threading.Event) -> None:
    quick, slow = Requests(masks, OBJECT, 1, "quick"), Requests(masks, SLOW, 1, "slow")
    quick.step(first_text)
    waiting = slow.constrained()
    both = masks.fill([*quick.constrained(), *waiting]).collect(Patience(5.0, False, 0.0))
    assert list(both.late) == ["slow0"]
    assert allowed(both, 0) == allowed(quick.fill(), 0)
    gate.set()
    assert masks.fill(waiting).collect().late == {}


def test_masks_that_a_step_is_alone_with_are_waited_for_until_a_chat_comes(
    masks: GrammarMasks, gate: threading.Event
) -> None:
    slow = Requests(masks, SLOW, 1)
    looks = iter([False, False, True])
    mask = masks.fill(slow.constrained()).collect(Patience(0.0, True, 60.0, lambda: next(looks)))
    assert list(mask.late) == ["0"]
    assert list(looks) == []
    threading.Timer(0.05, gate.set).start()
    assert masks.fill(slow.constrained()).collect(Patience(0.0, True, 60.0, lambda: False)).late == {}


def test_no_thread_of_pythons_is_put_back_behind_others(masks: GrammarMasks) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    before = {int(thread) for thread in os.listdir("/proc/self/task")}
    masks.warm_up()
    Requests(masks, OBJECT, 2).step(first_text)
    new = {int(thread) for thread in os.listdir("/proc/self/task")} - before
    niceness: dict[int, int] = {}
    for thread in new:
        with contextlib.suppress(ProcessLookupError):  # one that made others, and has ended
            niceness[thread] = os.getpriority(os.PRIO_PROCESS, thread)
    pythons = {thread.native_id for thread in threading.enumerate() if thread.name != MAKER}
    assert {nice for thread, nice in niceness.items() if thread in pythons} == {own}
    others = {nice for thread, nice in niceness.items() if thread not in pythons}
    put_back = min(own + NICENESS, 19)
    assert put_back in others
    assert others <= {own, put_back}  # quick masks have threads of their own, once there is one


def test_a_failure_of_the_quick_thread_leaves_no_request_waiting(
    masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests(masks, OBJECT, 2)
    requests.step(first_text)
    with monkeypatch.context() as patch:
        patch.setattr(MatcherPool, "mask", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            requests.fill()
    assert requests.fill().errors == {"0": GRAMMAR_ERROR, "1": GRAMMAR_ERROR}


def test_a_mask_that_stays_late_is_asked_for_less_often(masks: GrammarMasks, gate: threading.Event) -> None:
    slow = Requests(masks, SLOW, 1)
    waits_s = [masks.fill(slow.constrained()).collect(NOW).late["0"] for _ in range(12)]
    assert waits_s[:3] == [waits_s[0], 2 * waits_s[0], 4 * waits_s[0]]
    assert waits_s[-1] == 1.0


def test_what_was_asked_for_and_is_wanted_no_more_is_not_computed(
    masks: GrammarMasks, gate: threading.Event, computed: list[bytes], tokenizer: Tokenizer
) -> None:
    """Two are being compiled, a third waits: its request ends first."""
    held = [Requests(masks, SLOW, 1), Requests(masks, f'{SLOW} "er"', 1)]
    for requests in held:
        masks.fill(requests.constrained()).collect(NOW)
    gone, stays = Requests(masks, 'start: "ab"', 1), Requests(masks, 'start: "cd"', 1)
    for requests, token in ((gone, "a"), (stays, "c")):
        requests.outputs = [tokenizer.encode(token)]
        assert list(masks.fill(requests.constrained()).collect(NOW).late) == ["0"]
    gone.leave()
    gate.set()
    for requests in (*held, stays):
        requests.fill()
    assert np.array(stays.outputs[0], np.int32).tobytes() in computed
    assert np.array(gone.outputs[0], np.int32).tobytes() not in computed


def test_matchers_beyond_the_bound_are_dropped_and_made_again(masks: GrammarMasks) -> None:
    free = Requests(masks, OBJECT, 6)
    picks = [lambda i, tokens: tokens[i % len(tokens)]] * 8
    for pick in picks:
        free.step(pick)
    masks._places = GrammarPlaces(most_bytes=3 * BASE_BYTES, most_unused_bytes=0)
    bound = Requests(masks, OBJECT, 6)
    for pick in picks:
        bound.step(pick)
        assert masks.num_bytes <= 3 * BASE_BYTES
    assert bound.outputs == free.outputs


def test_grammars_that_no_request_has_are_kept_within_their_bound(masks: GrammarMasks) -> None:
    masks._places = GrammarPlaces(most_unused_bytes=20 * BASE_BYTES)
    for number in range(40):
        requests = Requests(masks, f'start: "{number}" /[a-z]*/', 2)
        for _ in range(3):
            requests.step(first_text)
        requests.leave()
    assert 0 < masks.num_bytes <= 20 * BASE_BYTES
    assert 2 <= len(masks._places._grammars) <= 20


def test_a_grammar_that_is_kept_is_not_compiled_again(masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_ = Grammars.compile
    monkeypatch.setattr(Grammars, "compile", lambda self, g: (compiled.append(g), compile_(self, g))[1])
    for _ in range(3):
        requests = Requests(masks, OBJECT, 2)
        for _ in range(3):
            requests.step(first_text)
        requests.leave()
    assert compiled == [OBJECT]


def test_a_grammar_whose_first_mask_takes_too_long_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = itertools.count(0.0, 0.2)  # so long does everything take
    monkeypatch.setattr(time, "thread_time", lambda: next(readings))
    grammars = Grammars(model, VOCAB_SIZE, [EOS_TOKEN_ID])
    with pytest.raises(GrammarError, match=TOO_SLOW):
        grammars.check(OBJECT)
    monkeypatch.setattr(time, "thread_time", lambda: min(next(readings), 1.9))  # but for the last time
    grammars.check(OBJECT)


def test_an_output_that_its_grammar_does_not_allow_fails_alone(masks: GrammarMasks) -> None:
    requests = Requests(masks, json.dumps({"grammars": [{"lark_grammar": 'start: "ab"'}]}), 2)
    (token,) = {allowed(requests.fill(), 0)[0]}
    requests.outputs = [[token], [token + 1]]
    mask = requests.fill()
    assert mask.errors == {"1": GRAMMAR_ERROR}
    assert allowed(mask, 0) != []
