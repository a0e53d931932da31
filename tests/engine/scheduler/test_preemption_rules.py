"""Who may be preempted for whom, over random loads on a cache that is far too small.

After every step the harness counts again: blocks are free, cached or held, and segments are wanted by as many as wait
and run.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.params import Tier
from neaptide.engine.request import Request
from neaptide.engine.scheduler.actions import Admit, Grow, Preempt, Schedule
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.scheduler.queues import deadline_order
from tests.engine.harness import Harness, batch, flex, online

NUM_BLOCKS = 16
PROMPTS = st.integers(1, 36)
"""At most two thirds of the cache."""
ANSWERS = st.integers(1, 12)


@dataclass(frozen=True)
class Arrival:
    tier: Tier
    num_prompt_tokens: int
    max_tokens: int
    ttft_s: float
    tpot_s: float
    num_steps_before: int


arrivals = st.builds(
    Arrival,
    st.sampled_from(list(Tier)),
    PROMPTS,
    ANSWERS,
    st.sampled_from([0.02, 0.1, 1.0]),
    st.sampled_from([0.01, 0.03, 0.2]),
    st.integers(0, 3),
)


class Rules:
    """Looks at every draft before it is applied."""

    def __init__(self, harness: Harness) -> None:
        self.victims: Counter[tuple[str, str]] = Counter()
        """By the classes of the one that made way and of the one that it made way for."""
        self._evicted: dict[tuple[str, int], set[str]] = {}
        """By an offline request's id and admission, the ids of those that made way for it."""
        scheduler = harness.core.scheduler
        draft_step = scheduler.draft

        def checked(now_s: float) -> Draft:
            draft = draft_step(now_s)
            self._check(draft)
            return draft

        scheduler.draft = checked  # type: ignore[method-assign]

    def _check(self, draft: Draft) -> None:
        victims: list[Request] = []
        for action in draft.actions:
            match action:
                case Preempt(victim):
                    victims.append(victim)
                case Admit(requester) | Schedule(requester) | Grow(requester):
                    for victim in victims:
                        self._check_pair(requester, victim)
                    victims = []
                case _:
                    assert not victims, "somebody made way for nobody"
        assert not victims, "somebody made way for a request that still does not fit"

    def _check_pair(self, requester: Request, victim: Request) -> None:
        self.victims[victim.request_class.name, requester.request_class.name] += 1
        if victim.is_online:
            assert requester.is_online, "an online request made way for an offline one"
            assert deadline_order(victim) > deadline_order(requester), "made way for one that is due later"
        elif not requester.is_online:
            assert victim.admission_index > requester.admission_index, "made way for a younger one"
            life = requester.request_id, requester.admission_index
            self._evicted.setdefault(life, set()).add(victim.request_id)
            back = self._evicted.get((victim.request_id, victim.admission_index), set())
            assert requester.request_id not in back, "two requests make way for one another"


def materialized(make_room: Callable[..., bool], superfluous: list[str]) -> Callable[..., bool]:
    """``Draft.make_room``, which notes victims without whom the others would have been enough. (It does not raise: the
    engine would take it for a request's fault, and go on without that.)"""

    def checked(
        draft: Draft, num_blocks: int, victims: Iterable[Request], keep: Collection[int] = (), slots: int = 0
    ) -> bool:
        kv, num_actions = draft.kv, len(draft.actions)
        available, tables = kv.available, {request: list(kv.blocks_of(request)) for request in draft.all_running()}
        readers = {block: kv.pool.ref_cnt(block) for table in tables.values() for block in table}
        is_made = make_room(draft, num_blocks, victims, keep, slots)
        chosen = [action.request for action in draft.actions[num_actions:] if isinstance(action, Preempt)]
        for spared in chosen:
            released = Counter(block for victim in chosen if victim is not spared for block in tables[victim])
            num_freed = sum(count == readers[block] and block not in keep for block, count in released.items())
            if available + num_freed >= num_blocks and len(chosen) > slots:
                superfluous.append(spared.request_id)
        return is_made

    return checked


def run(load: list[Arrival], directory: Path) -> Rules:
    superfluous: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draft, "make_room", materialized(Draft.make_room, superfluous))
        rules = run_by_rules(load, directory)
    assert not superfluous, "the others would have been enough"
    return rules


def run_by_rules(load: list[Arrival], directory: Path) -> Rules:
    harness = Harness(NUM_BLOCKS, max_num_seqs=5, max_num_batched_tokens=24, offline_max_kv_ratio=0.9)
    rules = Rules(harness)
    for index, one in enumerate(load):
        for _ in range(one.num_steps_before):
            harness.step()
        prompt = [index % 3] * 8 + [index + 10] * one.num_prompt_tokens
        prompt = prompt[: max(one.num_prompt_tokens, 9)]
        name, now_s = f"r{index}", harness.clock.now()
        if one.tier is Tier.BATCH:
            harness.core.handle(batch(directory, name, [prompt, prompt[::-1], prompt], one.max_tokens))
        elif one.tier is Tier.FLEX:
            harness.core.handle(flex(name, prompt, one.max_tokens, arrival_s=now_s))
        else:
            targets = {"tier": one.tier, "arrival_s": now_s, "ttft_slo_s": one.ttft_s, "tpot_slo_s": one.tpot_s}
            harness.core.handle(online(name, prompt, one.max_tokens, **targets))
    harness.run(max_steps=2000)
    return rules


@settings(max_examples=25)
@given(st.lists(arrivals, min_size=2, max_size=12))
def test_victims_are_of_lower_rank_and_make_way_for_what_then_fits(load: list[Arrival]) -> None:
    with TemporaryDirectory() as directory:
        run(load, Path(directory))


def crowd(rng: random.Random) -> list[Arrival]:
    """Prompts of half the cache at almost every step: more than drawn loads, which are small, it takes memory away."""
    return [
        Arrival(
            rng.choice(list(Tier)),
            rng.randint(8, 36),
            rng.randint(6, 24),
            rng.choice([0.02, 0.1, 1.0]),
            rng.choice([0.01, 0.03, 0.2]),
            rng.randint(0, 2),
        )
        for _ in range(14)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_so_they_are_in_crowds_where_requests_of_every_class_make_way(seed: int, tmp_path: Path) -> None:
    victims = run(crowd(random.Random(seed)), tmp_path).victims
    assert set(victims) >= {("OFFLINE", "ONLINE"), ("OFFLINE", "OFFLINE"), ("ONLINE", "ONLINE")}


def test_rows_of_all_sizes_make_way_for_large_prompts(tmp_path: Path) -> None:
    rng, load = random.Random(0), []
    for _ in range(5):
        load += [Arrival(Tier.FLEX, rng.randint(1, 20), 24, 1.0, 0.2, 0) for _ in range(4)]
        load.append(Arrival(Tier.DEFAULT, rng.randint(20, 34), 2, 1.0, 0.2, 3))
    assert run(load, tmp_path).victims["OFFLINE", "ONLINE"] > 5


def test_no_younger_one_makes_way_where_an_older_one_would_have_to_as_well(tmp_path: Path) -> None:
    """The first load that was found to drop a request for nothing."""
    found = [(18, 7, 3), (35, 7, 2), (4, 10, 1), (14, 7, 0), (35, 5, 3), (26, 12, 2), (35, 6, 0), (29, 11, 0)]
    run([Arrival(Tier.FLEX, prompt, answer, 1.0, 0.2, steps) for prompt, answer, steps in found], tmp_path)


def test_such_loads_have_victims_of_every_kind(tmp_path: Path) -> None:
    """Else the rules above would hold of nothing."""
    rows = [Arrival(Tier.FLEX, 20, 12, 1.0, 0.2, 0) for _ in range(4)]
    chats = [Arrival(Tier.DEFAULT, 30, 12, ttft_s, 0.2, 2) for ttft_s in (1.0, 0.1)]
    counts = [run(load, tmp_path).victims.total() for load in (rows, rows + chats)]
    assert all(fewer < more for fewer, more in pairwise([0, *counts]))
