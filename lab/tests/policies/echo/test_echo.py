"""Echo's BS+E+S and Echo by hand. A step takes 10 ms and 1 ms for each of its tokens."""

from pathlib import Path

import pytest

from neaptide.engine.kv.draft import NO_HIT
from neaptide.engine.params import RequestClass
from neaptide.engine.scheduler.draft import Draft
from neaptide_lab.policies.echo_selector import EchoWithSelector, OfflinePlan, best_of, scores_without
from tests.engine.baselines.costs import PerTokenCost
from tests.engine.harness import Harness, batch, online

A, B = [1] * 32, [2] * 32
"""Documents of eight blocks."""


def harness(policy: str, **fields: object) -> Harness:
    return Harness(**({"policy": policy, "cost_model": PerTokenCost()} | fields))  # type: ignore[arg-type]


def prompt(num_tokens: int, first: int) -> list[int]:
    return list(range(first, first + num_tokens))


def cached_tokens(engine: Harness) -> dict[str, int]:
    return {request_id: output.num_cached_tokens for request_id, (output,) in engine.ends.items()}


# ---- joining ----


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        ("bs+e", [{"a:0": 33}, {"a:1": 33}, {"b:0": 1}]),
        ("bs+e+s", [{"a:0": 33}, {"b:0": 1}, {"a:1": 33}]),
    ],
)
def test_the_row_that_finds_its_prefix_goes_before_one_that_stands_before_it(
    policy: str, steps: list[dict[str, int]], tmp_path: Path
) -> None:
    engine = harness(policy, max_num_seqs=1)
    engine.core.handle(batch(tmp_path, "a", [[*A, 9], [*B, 9]], max_tokens=1))
    assert engine.step() == steps[0]
    # b's deadline is no earlier than a's; its only row shares a:0's document, of which its own file knows nothing.
    engine.core.handle(batch(tmp_path, "b", [[*A, 8]], max_tokens=1))
    assert engine.run() == steps[1:]


def plans(engine: Harness) -> dict[str, OfflinePlan]:
    scheduler = engine.core.scheduler
    assert isinstance(scheduler, EchoWithSelector)
    made = {}

    def pack(draft: Draft) -> float:
        for plan in scheduler.plans(draft, 1.0):
            made[plan.request.request_id] = plan
        return 1.0

    scheduler.pack = pack  # type: ignore[method-assign]
    engine.step()
    return made


def test_a_plan_counts_what_it_brings_what_it_evicts_and_how_long_it_takes(tmp_path: Path) -> None:
    engine = harness("bs+e+s", max_num_seqs=1)
    engine.core.handle(batch(tmp_path, "job", [[*A, 8], [*A, 9], prompt(12, 100), prompt(70, 200)], max_tokens=1))
    assert engine.step() == {"job:3": 70}  # in 80 ms, which is better than 33 in 43 and 12 in 22
    assert engine.step() == {"job:0": 33}
    made = plans(engine)
    assert {
        name: (p.hit.num_tokens, p.num_tokens, p.benefit_tokens, p.punishment_tokens) for name, p in made.items()
    } == {
        "job:1": (32, 1, 33, 0),
        "job:2": (0, 12, 12, 0),
    }
    assert {name: p.seconds for name, p in made.items()} == {"job:1": 0.011, "job:2": 0.022}
    assert made["job:1"].score == pytest.approx(3000.0)
    assert best_of(list(made.values())) is made["job:1"]


def test_a_plan_is_punished_for_evicting_what_a_row_still_wants(tmp_path: Path) -> None:
    engine = harness("bs+e+s", num_blocks=12, max_num_seqs=1)
    engine.core.handle(batch(tmp_path, "job", [[*A, 8], [*A, 9], prompt(24, 100)], max_tokens=1))
    assert engine.step() == {"job:0": 33}
    made = plans(engine)
    # Four blocks are free, eight hold the document, which job:1 wants. job:2 takes six: two of them are lost.
    assert (made["job:2"].benefit_tokens, made["job:2"].punishment_tokens) == (24, 8)
    assert made["job:2"].score == pytest.approx(16 / 0.034)
    # job:1 reads the eight blocks itself.
    assert (made["job:1"].benefit_tokens, made["job:1"].punishment_tokens) == (33, 0)


def test_the_best_plan_is_that_of_the_highest_score_the_first_of_equals() -> None:
    def plan(benefit_tokens: int, punishment_tokens: int, seconds: float) -> OfflinePlan:
        return OfflinePlan(None, NO_HIT, 1, benefit_tokens, punishment_tokens, seconds)  # type: ignore[arg-type]

    made = [plan(10, 0, 1.0), plan(40, 0, 2.0), plan(90, 50, 2.0), plan(60, 20, 1.9)]
    assert best_of(made) is made[3]
    assert best_of(made[:3]) is made[1]


def test_where_the_slack_does_not_suffice_the_shortest_decodes_take_part(tmp_path: Path) -> None:
    steps = {}
    for policy in ("bs+e", "bs+e+s"):
        engine = harness(policy)
        rows = [prompt(20, 100), prompt(4, 200), prompt(9, 300)]
        engine.core.handle(batch(tmp_path, policy, rows, max_tokens=9))
        engine.step()
        message = online("a", prompt(4, 400), 9, arrival_s=engine.clock.now(), ttft_slo_s=0.0165, tpot_slo_s=0.0128)
        engine.core.handle(message)
        # The prompt takes 14 ms of 16.5, with two decodes 16. Then 13.3 ms are left, and three decodes take 13.
        steps[policy] = [engine.step(), engine.step()]
    assert steps == {
        "bs+e": [{"a": 4, "bs+e:0": 1, "bs+e:1": 1}, {"a": 1, "bs+e:0": 1, "bs+e:1": 1}],
        "bs+e+s": [{"a": 4, "bs+e+s:1": 1, "bs+e+s:2": 1}, {"a": 1, "bs+e+s:1": 1, "bs+e+s:2": 1}],
    }


# ---- dropping ----


@pytest.mark.parametrize(("policy", "dropped"), [("bs+e", "be:1"), ("bs+e+s", "be:0")])
def test_the_request_with_least_to_compute_again_is_dropped(policy: str, dropped: str, tmp_path: Path) -> None:
    engine = harness(policy, num_blocks=8)
    engine.core.handle(batch(tmp_path, "be", [prompt(7, 100), prompt(15, 200)], max_tokens=9))
    assert engine.step() == {"be:0": 7, "be:1": 15}
    engine.core.handle(online("a", prompt(12, 300), 1, arrival_s=engine.clock.now()))
    engine.step()
    assert engine.core.scheduler.queues.pool.returned[0].request_id == dropped


def test_the_score_of_the_step_without_a_request(tmp_path: Path) -> None:
    engine = harness("bs+e+s", num_blocks=32)
    engine.core.handle(batch(tmp_path, "be", [[*A, *prompt(5, 100)], [*A, *prompt(9, 200)]], max_tokens=9))
    engine.step()
    engine.step()
    engine.core.scheduler.pack = lambda draft: 1.0  # type: ignore[method-assign]
    draft = engine.core.scheduler.draft(engine.clock.now())
    victims = draft.running(RequestClass.OFFLINE)
    # A token of the other one in 11 ms is left; what stands behind the common document would be computed again.
    assert scores_without(draft, victims, PerTokenCost()) == pytest.approx([(1 - 6) / 0.011, (1 - 10) / 0.011])


# ---- the cache ----


@pytest.mark.parametrize(("policy", "found"), [("bs+e+s", [0, 0, 32]), ("echo", [0, 32, 32])])
def test_echo_keeps_the_document_that_rows_want_where_an_lru_cache_evicts_it(
    policy: str, found: list[int], tmp_path: Path
) -> None:
    engine = harness(policy, num_blocks=20, max_num_batched_tokens=33, max_num_seqs=1)
    engine.core.handle(batch(tmp_path, "job", [[*A, 7], [*A, 8], [*A, 9]], max_tokens=1))
    engine.step()
    for k in range(3):  # chats that need most of the cache between the rows
        engine.core.handle(online(f"chat{k}", [20 + k] * 33, max_tokens=1, arrival_s=engine.clock.now()))
        assert engine.step() == {f"chat{k}": 33}
    engine.run()
    cached = cached_tokens(engine)
    assert [cached[f"job:{row}"] for row in range(3)] == found


@pytest.mark.parametrize(("policy", "num_running"), [("bs+e+s", 4), ("echo", 2)])
def test_what_runs_leaves_the_forecast_of_online_work_free(policy: str, num_running: int, tmp_path: Path) -> None:
    engine = harness(policy, num_blocks=16, headroom_ratio=0.5)
    engine.core.handle(batch(tmp_path, "job", [prompt(15, 100 * k) for k in range(1, 5)], max_tokens=2))
    # Four blocks each; eight of sixteen are online work's.
    assert len(engine.step()) == num_running


def test_a_lone_request_is_not_held_to_the_threshold(tmp_path: Path) -> None:
    engine = harness("echo", num_blocks=16, headroom_ratio=0.5)
    engine.core.handle(batch(tmp_path, "job", [prompt(40, 100)], max_tokens=1))
    assert engine.step() == {"job:0": 40}
