"""Where a prompt goes: never to a full replica while another has room, and where its prefix is if both have."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.cluster.routing import (
    ROUTERS,
    LeastLoadRouter,
    Prompt,
    RandomRouter,
    RoundRobinRouter,
    RoutingFigures,
    SlackRouter,
    build_router,
)
from neaptide.engine.kv.cache_digest import digest_of

BLOCK = 16


def hashes(seed: int, count: int) -> list[bytes]:
    """Of blocks; every one is in a digest."""
    return [bytes([k % 32]) + seed.to_bytes(4) + k.to_bytes(4) for k in range(count)]


def prompt(seed: int = 0, blocks: int = 8) -> Prompt:
    return Prompt.of(blocks * BLOCK + 1, hashes(seed, blocks), BLOCK)


def figures(slack_ms: float, digest: list[bytes] | None = None) -> RoutingFigures:
    """A token takes 1 ms of it."""
    return RoutingFigures(slack_ms, 1000.0, 1.0, None if digest is None else digest_of(digest))


def test_the_longest_cached_prefix_wins_among_replicas_with_next_to_the_most_slack() -> None:
    """Behind the prompt a would have 871 ms left, b 859, c 856."""
    router = SlackRouter()
    router.report("a", figures(1000.0))
    router.report("b", figures(860.0, hashes(0, 8)))
    router.report("c", figures(921.0, hashes(0, 4)))
    assert router.route(prompt()) == "b"
    assert router.route(prompt(seed=1)) == "a"


def test_a_prefix_does_not_count_where_it_would_cost_more_slack_than_is_conceded() -> None:
    """Of 129 tokens one is left to compute on b; a would have 871 ms left, and 100 are conceded."""
    for slack_ms, chosen in ((772.0, "b"), (771.0, "a")):
        router = SlackRouter()
        router.report("a", figures(1000.0))
        router.report("b", figures(slack_ms, hashes(0, 8)))
        assert router.route(prompt()) == chosen


def test_where_no_replica_has_slack_the_least_late_one_takes_the_prompt_its_cache_included() -> None:
    router = SlackRouter()
    router.report("a", figures(-100.0))
    router.report("b", figures(-150.0, hashes(0, 8)))
    assert router.route(prompt()) == "b"


@given(
    slacks_ms=st.lists(st.floats(-2000.0, 1000.0), min_size=2, max_size=8),
    cached=st.data(),
    blocks=st.integers(1, 30),
)
def test_a_full_replica_is_never_chosen_while_one_has_slack(
    slacks_ms: list[float], cached: st.DataObject, blocks: int
) -> None:
    router, left_ms = SlackRouter(), {}
    for number, slack_ms in enumerate(slacks_ms):
        found = cached.draw(st.integers(0, blocks))
        router.report(str(number), figures(slack_ms, hashes(0, found)))
        left_ms[str(number)] = slack_ms - (blocks * BLOCK + 1 - found * BLOCK)
    chosen = router.route(prompt(blocks=blocks))
    assert left_ms[chosen] >= 0.0 or max(left_ms.values()) < 0.0


@pytest.mark.parametrize("name", ["slack", "least-load"])
@given(seeds=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5), replicas=st.integers(1, 6))
def test_the_same_prefix_goes_to_the_same_replica_when_slack_is_equal(
    name: str, seeds: list[int], replicas: int
) -> None:
    """Whichever router process asks, in whatever order the replicas came."""
    names = [f"replica-{k}" for k in range(replicas)]
    for seed in seeds:
        chosen = set()
        for order in (names, names[::-1]):
            router = build_router(name)
            for replica in order:
                router.report(replica, figures(800.0))
            chosen.add(router.route(prompt(seed, blocks=4)))
            chosen.add(router.route(prompt(seed, blocks=8))) if name == "slack" else None
        assert len(chosen) == 1


def test_what_was_sent_counts_until_the_next_report() -> None:
    """129 tokens each: after the first the other one has more slack."""
    router = SlackRouter(by_prefix=False)
    for replica in ("a", "b"):
        router.report(replica, figures(1000.0))
    assert {router.route(prompt(0)), router.route(prompt(1))} == {"a", "b"}
    router.report("a", figures(100.0))
    router.report("b", figures(1000.0))
    assert router.route(prompt(2)) == "b"


def test_a_prompt_that_was_sent_draws_its_like_before_the_digest_shows_it_and_not_for_ever() -> None:
    router = SlackRouter()
    for replica in ("a", "b"):
        router.report(replica, figures(900.0, []))
    first = router.route(prompt())
    other = "b" if first == "a" else "a"
    router.report(other, figures(1000.0, []))
    router.report(first, figures(900.0, []))
    assert router.route(prompt()) == first
    for _ in range(2):
        router.report(first, figures(900.0, []))
    assert router.route(prompt(seed=0)) == other


def test_a_report_without_a_digest_keeps_the_one_before() -> None:
    router = SlackRouter()
    router.report("a", figures(1000.0))
    router.report("b", figures(900.0, hashes(0, 8)))
    router.report("b", figures(900.0))
    assert router.route(prompt()) == "b"


def test_a_replica_that_left_gets_nothing_and_without_any_there_is_no_route() -> None:
    for name in ROUTERS:
        router = build_router(name)
        for replica in ("a", "b"):
            router.report(replica, figures(1000.0))
        router.leave("a")
        assert {router.route(prompt(seed)) for seed in range(8)} == {"b"}
        router.leave("b")
        router.leave("b")
        with pytest.raises(LookupError):
            router.route(prompt())


def test_a_digest_has_one_block_in_eight_and_the_prompt_the_same_ones() -> None:
    rng = Random(0)
    blocks = [rng.randbytes(32) for _ in range(4000)]
    digest = digest_of(blocks)
    assert 400 < len(digest) < 600
    whole = Prompt.of(4000 * BLOCK, blocks, BLOCK)
    assert {key for key, _ in whole.keys} == digest
    assert all(tokens % BLOCK == 0 for _, tokens in whole.keys)


# ---- rivals ----


def test_least_load_goes_by_the_requests_in_flight() -> None:
    router = LeastLoadRouter()
    router.report("a", figures(1000.0))
    router.report("b", figures(-1000.0))
    first, second, third = (router.route(prompt(seed)) for seed in range(3))
    assert first != second
    router.report(first, figures(1000.0))
    router.ended(second if third == first else first)
    assert router.route(prompt(9)) == (second if third == first else first)


def test_of_equal_slack_the_replica_with_fewer_requests_in_flight_is_chosen() -> None:
    router = SlackRouter()
    for replica in ("a", "b"):
        router.report(replica, figures(0.0))
    first = router.route(Prompt(1))
    for replica in ("a", "b"):
        router.report(replica, figures(0.0))
    assert router.route(Prompt(1)) != first
    router.ended("nowhere")


def test_round_robin_goes_round() -> None:
    router = RoundRobinRouter()
    for replica in ("a", "b", "c"):
        router.report(replica, figures(0.0))
    assert [router.route(prompt()) for _ in range(5)] == ["a", "b", "c", "a", "b"]


def test_random_is_the_seed_s_and_reaches_all() -> None:
    chosen = []
    for _ in range(2):
        router = RandomRouter(Random(7))
        for replica in ("a", "b", "c"):
            router.report(replica, figures(0.0))
        chosen.append([router.route(prompt()) for _ in range(60)])
    assert chosen[0] == chosen[1]
    assert min(Counter(chosen[0]).values()) > 8


def test_a_router_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="there are: slack, slack-alone"):
        build_router("fastest")
