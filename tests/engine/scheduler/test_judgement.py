"""The judgement of a step, to the token: who is expected to be late, how long online prompts may make it, and what
offline work brings.

Times are whole numbers of binary fractions of a second, so that a limit is met exactly or not at all.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.scheduler import judgement
from neaptide.engine.scheduler.budget import PromptSteps
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.scheduler.judgement import EQUAL, Choice, Judgement, PendingPrompt
from neaptide.engine.scheduler.packing import LOOK_AHEAD, NeaptideScheduler
from neaptide.engine.scheduler.prompts import LATE_CREDIT
from neaptide.engine.steps.plan import BatchShape
from tests.engine.harness import Harness, flex, online
from tests.engine.scheduler.bounds.test_worth_bound import Launches
from tests.engine.scheduler.judging import empty_draft, judged, request_of
from tests.engine.scheduler.test_margins_and_bounds import TOKEN_S, InProportion, PerToken, Prediction

TPOT_TOKENS = 64
"""A token's target is a second."""


def engine(cost_model: PerToken | None = None, **fields: object) -> Harness:
    values: dict[str, object] = {"delivery_latency_s": 0.0, "ttft_slo_s": 50.0, "max_num_batched_tokens": 4096}
    return Harness(2000, cost_model or PerToken(), **(values | fields))  # type: ignore[arg-type]


def with_streams(num_streams: int, answer: int = 0, tpot_tokens: int = TPOT_TOKENS, **fields: object) -> Harness:
    """Streams that have put out one token, and whose next ones are due in a second, where answers are of so many
    tokens."""
    harness = engine(**fields)  # type: ignore[arg-type]
    for k in range(num_streams):
        asked = online(f"stream{k}", [7], max_tokens=50, tpot_slo_s=tpot_tokens * TOKEN_S, ttft_slo_s=50.0)
        harness.core.handle(asked)
    for _ in range(0, num_streams, LOOK_AHEAD):
        harness.step()
    if answer:
        for k in range(200):
            policy(harness).traffic.observe_end(request_of(str(k), 1, answer))
    return harness


def with_arrivals() -> Harness:
    """No streams; two requests a second, of 16 tokens, which can wait for half a second."""
    harness = engine()
    policy(harness).traffic.observe_arrival(request_of("a", 16, ttft_slo_s=64 * TOKEN_S))
    return harness


def policy(harness: Harness) -> NeaptideScheduler:
    scheduler = harness.core.scheduler
    assert isinstance(scheduler, NeaptideScheduler)
    return scheduler


def late_by(found: Judgement, *late_s: float, count: float = 1.0, margin_s: float = 0.0) -> list[float]:
    """Expected late streams if all are so late, each step by itself."""
    slack_s = np.tile(-np.array(late_s)[:, None], (1, len(found._slack_s)))
    return list(found.late_streams(slack_s, slack_s, count, np.array([[margin_s]])).tolist())


# ---- requests that arrive during a step ----


def test_who_comes_is_late_if_the_end_is_further_than_it_can_wait() -> None:
    found = judged(engine())
    found._set_waits(np.array([1.0, 2.0, 4.0]), 0.5)
    # Half a request a second for each wait: in a step of 3 s those who wait for more than one and two.
    assert found.late_arrivals(np.array([0.0, 1.0, 1.5, 3.0, 5.0])).tolist() == [0.0, 0.0, 0.25, 1.5, 4.0]


def test_what_they_wait_for_after_the_step_counts_and_who_would_be_late_anyway_does_not() -> None:
    found = judged(engine())
    found._set_waits(np.array([1.0, 2.0, 4.0]), 0.5)
    assert found.late_arrivals(np.array([0.0, 1.0, 2.0]), 1.5).tolist() == [0.0, 0.25, 0.75]


def test_before_any_request_has_come_one_is_expected_that_needs_half_of_its_target() -> None:
    found = judged(engine(ttft_slo_s=2.0))
    assert found.late_arrivals(np.array([1.0, 5.0])).tolist() == [0.0, 4.0 / 20.0]


def test_it_has_time_for_delivery_too() -> None:
    assert judged(engine(ttft_slo_s=2.0, delivery_latency_s=0.5)).wait_s == 0.75


def test_who_comes_waits_for_the_steps_in_flight_too() -> None:
    assert judged(engine(ttft_slo_s=2.0, overlap_depth=1)).wait_s == 0.5


def test_a_request_can_wait_for_what_its_own_prompt_and_those_before_it_leave() -> None:
    harness = engine()
    policy(harness).traffic.observe_arrival(request_of("a", 16, ttft_slo_s=64 * TOKEN_S))
    # Two a second, of a quarter of a second each: half of the time. Of 48 tokens' time it can wait two thirds.
    found = judged(harness)
    assert found.wait_s == 0.5
    assert found.late_arrivals(np.array([0.5, 1.0])).tolist() == [0.0, 1.0]


def test_arrivals_have_time_for_delivery() -> None:
    harness = engine(delivery_latency_s=12 * TOKEN_S)
    policy(harness).traffic.observe_arrival(request_of("a", 16, ttft_slo_s=64 * TOKEN_S))
    assert judged(harness).wait_s == 36 * TOKEN_S / 1.5


def test_the_error_of_the_cost_model_spreads_what_arrivals_can_wait() -> None:
    harness = engine(InProportion())
    policy(harness).traffic.observe_arrival(request_of("a", 16, ttft_slo_s=64 * TOKEN_S))
    found = judged(harness)  # a margin of 4 tokens
    waits = (np.array([48 - 2.8, 48 - 0.8, 48 + 0.8, 48 + 2.8]) * TOKEN_S / 1.5).tolist()
    assert found._waits_s.tolist() == pytest.approx(waits)
    assert found.wait_s == pytest.approx(waits[1])


def test_without_the_part_nobody_is_expected() -> None:
    harness = engine()
    policy(harness).traffic.observe_arrival(request_of("a", 16, ttft_slo_s=64 * TOKEN_S))
    assert judged(harness, ("arrivals",)).late_arrivals(np.array([0.5, 9.0])).tolist() == [0.0, 0.0]


# ---- streams ----


def test_a_stream_in_time_is_not_late() -> None:
    assert late_by(judged(with_streams(1)), -0.5, -0.01) == [0.0, 0.0]


def test_a_stream_that_is_behind_is_late_until_it_has_made_that_good() -> None:
    """One prompt of a token has come, so two a second: with each token of a second it gains 61 tokens' time. Its
    answer of 32 tokens has 31 left."""
    late = late_by(judged(with_streams(1)), 0.5, 61 * TOKEN_S)
    assert late == pytest.approx([(1.0 + 0.5 * 64 / 61) / 31, 2.0 / 31])


def test_a_stream_that_hardly_gains_is_late_for_long_but_not_for_ever() -> None:
    harness = with_streams(63, tpot_tokens=128)
    harness.core.scheduler.queues.table.tpot_slo_s[:63] = TPOT_TOKENS * TOKEN_S  # decodes take nearly all of it
    late = late_by(judged(harness), 1.0)
    assert late == pytest.approx([63 * (1.0 + 1.0 / 0.02) / 31])


def test_a_prediction_that_may_be_wrong_makes_a_share_of_it_late() -> None:
    found = judged(with_streams(1))
    behind = [each * 31 for each in late_by(found, -0.5, -0.25, 0.0, margin_s=0.5)]
    assert behind == pytest.approx([0.0, 0.25, 0.5])


def test_tokens_in_between_count_as_they_fall_behind() -> None:
    """The first of eight tokens has half a second, the last is one too late: 0, 1/2, 1 and 1 of four looked at."""
    found = judged(with_streams(1))
    late = found.late_streams(np.array([[0.5]]), np.array([[-1.0]]), 8.0, np.array([[0.25]]))
    assert late.tolist() == pytest.approx([(2.5 * 8 / 4 + 64 / 61) / 31])


def test_streams_with_short_answers_weigh_more_for_they_have_no_time_to_recover() -> None:
    ((short,), (long,)) = (late_by(judged(with_streams(1, answer)), 0.5) for answer in (3, 201))
    assert short == pytest.approx(long * 100)


@pytest.mark.parametrize(
    ("behind_tokens", "margin_tokens", "counts"),
    [(62, 0.0, True), (63, 0.0, False), (63, 0.5, True), (64, 0.5, False)],
)
def test_a_stream_that_decodes_alone_cannot_save_costs_nothing_more(
    behind_tokens: int, margin_tokens: float, counts: bool
) -> None:
    """A stream has 2 of 3 tokens left, and gains the time of 63 tokens with each, half a token more with luck."""
    harness = with_streams(1, answer=3, cost_model=PerToken(margin_s=margin_tokens * TOKEN_S))
    harness.clock.sleep_until(harness.clock.now() + (TPOT_TOKENS + behind_tokens) * TOKEN_S)
    found = judged(harness)
    assert found._slack_s.tolist() == [-behind_tokens * TOKEN_S]
    assert (late_by(found, 2.0)[0] > late_by(found, 1.0)[0]) == counts


@pytest.mark.parametrize(("delivery_tokens", "slack_tokens"), [(4, 60), (8, 57.6), (40, 57.6)])
def test_streams_keep_time_for_delivery_a_tenth_of_the_target_at_most(
    delivery_tokens: int, slack_tokens: float
) -> None:
    found = judged(with_streams(1, delivery_latency_s=delivery_tokens * TOKEN_S))
    assert found._slack_s.tolist() == pytest.approx([slack_tokens * TOKEN_S])


def test_streams_keep_slack_for_the_prompts_to_come() -> None:
    """As much as the backlog's tail is likely to take of them; nothing without the part."""
    harness = with_streams(2)
    for k in range(3):
        policy(harness).traffic.observe_arrival(request_of(f"long{k}", 3200))
    kept, none = (late_by(judged(harness, left_out), -3.0, -0.5) for left_out in ((), ("slack-reserve",)))
    assert none == [0.0, 0.0]
    assert 0.0 < kept[0] < kept[1]


def test_many_streams_are_looked_at_in_groups_with_similar_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = with_streams(150, max_num_seqs=256, cost_model=PerToken(TOKEN_S / 64))
    scheduler = policy(harness)
    for k, stream in enumerate(scheduler.queues.running_online.values()):
        stream.first_token_s += 0.05 * k
    late = {}
    for most in (judgement.MAX_STREAMS, 1000):
        monkeypatch.setattr(judgement, "MAX_STREAMS", most)
        found = judged(harness)
        left_s = found._slack_s - np.array([[1.0], [4.0], [8.0]])
        assert len(found._slack_s) == min(most, 150)
        late[most] = found.late_streams(left_s, left_s, 1.0, np.full((3, 1), 0.1))
    grouped, one_by_one = late.values()
    assert one_by_one[0] < one_by_one[1] < one_by_one[2]
    assert grouped == pytest.approx(one_by_one, rel=0.05)


# ---- of several prompts, those that are late ----

STEPS = PromptSteps(1.0, 0.0, 0.0, 1.0, 0.0)
"""A second each."""


def fewest_late(
    steps: list[float], due_s: list[float], pace: PromptSteps = STEPS, drops_longest: bool = True, has_output: int = -1
) -> tuple[list[bool], float, float]:
    prompts = [PendingPrompt(request_of(str(k), 4, int(k == has_output)), 4, 0) for k in range(len(steps))]
    return judgement._fewest_late(prompts, steps, due_s, pace, drops_longest)


def test_where_all_are_in_time_all_are_kept() -> None:
    assert fewest_late([1.0, 2.0, 1.0], [1.0, 3.0, 4.0]) == ([True, True, True], 0.0, 4.0)


def test_the_longest_so_far_is_dropped_where_one_would_be_late() -> None:
    assert fewest_late([4.0, 1.0, 1.0], [10.0, 4.5, 5.5]) == ([False, True, True], 1.0, 2.0)


def test_without_the_part_the_one_that_would_be_late_is_dropped() -> None:
    assert fewest_late([4.0, 1.0, 1.0], [10.0, 4.5, 6.5], drops_longest=False) == ([True, False, True], 1.0, 5.0)


def test_of_two_that_are_equally_long_the_later_is_dropped() -> None:
    assert fewest_late([2.0, 2.0], [10.0, 3.0]) == ([True, False], 1.0, 2.0)


def test_one_whose_answer_is_being_read_is_never_dropped() -> None:
    assert fewest_late([4.0, 1.0], [10.0, 4.5], has_output=0) == ([True, False], 1.0, 4.0)
    assert fewest_late([4.0], [1.0], has_output=0) == ([True], 1.0, 4.0)


def test_one_that_may_be_in_time_with_luck_is_kept_and_counts_for_its_chance() -> None:
    lucky = PromptSteps(1.0, 0.5, 0.0, 1.0, 0.0)
    assert fewest_late([1.0], [0.75], lucky) == ([True], 0.75, 1.0)
    assert fewest_late([1.0], [0.25], lucky) == ([False], 1.0, 0.0)


# ---- how long online prompts may make a step ----


def chosen(harness: Harness, *prompts: tuple[int, float]) -> Choice:
    """For waiting prompts of so many tokens that are due in so many tokens' time."""
    now_s = harness.clock.now()
    requests = [
        request_of(str(k), num_tokens, ttft_slo_s=due_tokens * TOKEN_S, at_s=now_s)
        for k, (num_tokens, due_tokens) in enumerate(prompts)
    ]
    asked = [PendingPrompt(request, request.num_prompt_tokens, 0) for request in requests]
    return judged(harness).choose(with_decodes(harness), asked, None)


def with_decodes(harness: Harness) -> Draft:
    """A draft with the decodes of all streams."""
    draft = empty_draft(harness)
    rows, reads = draft.decoding_streams()
    draft.add_decodes(rows, lambda _: True, draft.kv.available, reads)
    return draft


def test_without_streams_prompts_are_computed_whole() -> None:
    assert chosen(engine(), (200, 3000.0)).limit_s == pytest.approx(200 * TOKEN_S * (1.0 + EQUAL))


def test_of_equal_lengths_the_longest_is_taken() -> None:
    assert chosen(engine(), (100, 3000.0), (200, 3000.0)).limit_s == pytest.approx(300 * TOKEN_S * (1.0 + EQUAL))


@pytest.mark.parametrize(("answer", "is_whole"), [(2, False), (3000, True)])
def test_a_prompt_stalls_streams_whose_answers_are_long_and_is_late_itself_beside_short_ones(
    answer: int, is_whole: bool
) -> None:
    """Whole it takes 216 tokens' time and stalls 16 streams; in shorter steps it is late."""
    choice = chosen(with_streams(16, answer), (200, 235.0))
    assert (choice.limit_s == pytest.approx(216 * TOKEN_S * (1.0 + EQUAL))) == is_whole
    assert len(choice.in_time) == is_whole
    assert len(choice.late) == (not is_whole)


def test_a_prompt_that_has_time_makes_no_stream_late() -> None:
    """A target's time is the longest step that makes none late: the last step is shorter, so all keep the pace."""
    assert chosen(with_streams(32, 3000), (200, 2000.0)).limit_s == TPOT_TOKENS * TOKEN_S


def test_no_length_is_below_that_of_the_decodes() -> None:
    harness = with_streams(62)
    assert chosen(harness, (20, 3000.0)).limit_s >= 62 * TOKEN_S


def test_the_prompts_that_can_be_in_time_are_told_from_the_others() -> None:
    choice = chosen(engine(), (100, 50.0), (100, 120.0))
    assert [[request.request_id for request in part] for part in (choice.in_time, choice.late)] == [["1"], ["0"]]


@pytest.mark.parametrize(
    ("harness", "prompt_tokens", "due_tokens", "term"),
    [
        (lambda: with_streams(16, 2), 200, 235.0, "prompts"),
        (lambda: with_streams(16, 3000), 200, 235.0, "streams"),
        (lambda: with_arrivals(), 200, 3000.0, "arrivals"),
        (lambda: engine(), 200, 3000.0, ""),
    ],
)
def test_whom_a_length_makes_late_most_is_noted(
    harness: Callable[[], Harness], prompt_tokens: int, due_tokens: float, term: str
) -> None:
    """As above: the prompt is late beside short answers, and stalls streams with long ones."""
    made = harness()
    draft = with_decodes(made)
    request = request_of("a", prompt_tokens, ttft_slo_s=due_tokens * TOKEN_S, at_s=made.clock.now())
    judged(made).choose(draft, [PendingPrompt(request, prompt_tokens, 0)], None)
    (best,) = draft.chosen
    assert best.term == term
    assert (best.num_late > EQUAL) == bool(term)


def test_whom_a_length_with_offline_work_makes_late_most_is_noted() -> None:
    harness = engine(Launches(8.0), tpot_slo_s=5.0, late_price_s=0.0)
    for due_s, term in (([0.5], "prompts"), ([], "")):
        draft = empty_draft(harness)
        judged(harness).offline_length_s(draft, due_s, 0.0)
        assert draft.chosen[-1].term == term


def test_what_was_compared_is_noted() -> None:
    harness = with_streams(32, 2)
    draft = with_decodes(harness)
    request = request_of("a", 200, ttft_slo_s=50.0, at_s=harness.clock.now())
    choice = judged(harness).choose(draft, [PendingPrompt(request, 200, 0)], None)
    assert [one.length_s for one in draft.candidates] == sorted(one.length_s for one in draft.candidates)
    (best,) = draft.chosen
    assert best in draft.candidates
    assert (best.kind, best.length_s) == ("prompts", choice.limit_s)
    assert best.num_late <= min(one.num_late for one in draft.candidates) + EQUAL


# ---- how long a step with offline work may be ----


def offline_tokens(harness: Harness) -> int:
    """Offline tokens of the next step, of which it may have as many as fit."""
    harness.core.handle(flex("offline", [8] * 3000, max_tokens=1))
    return harness.step().get("offline", 0)


def test_where_late_requests_cost_nothing_offline_work_fills_a_step_to_the_token_target() -> None:
    harness = with_streams(1, cost_model=Launches(20.0), late_price_s=0.0)
    assert offline_tokens(harness) == TPOT_TOKENS - 20 - 1


def test_where_they_cost_much_nobody_is_made_late_for_it() -> None:
    harness = with_streams(1, 2, cost_model=Launches(20.0), late_price_s=1000.0)
    stream = harness.core.scheduler.queues.running_online["stream0"]
    stream.first_token_s -= 20 * TOKEN_S  # its next token is due in 43 tokens' time: the first is out since one step
    due_s = stream.next_deadline_s - harness.clock.now()
    assert offline_tokens(harness) > 0
    last = harness.watch.last
    assert last is not None
    assert last.plan.predicted_s <= due_s < TPOT_TOKENS * TOKEN_S


@settings(max_examples=30)
@given(
    price=st.floats(0.0, 100.0),
    target=st.integers(8, 300),
    launch=st.integers(0, 60),
    banked=st.floats(-100.0, 1000.0),
)
def test_beside_streams_a_step_with_offline_work_is_never_longer_than_the_target(
    price: float, target: int, launch: int, banked: float
) -> None:
    harness = with_streams(1, cost_model=Launches(float(launch)), late_price_s=price)
    stream = harness.core.scheduler.queues.running_online["stream0"]
    stream.tpot_slo_s = target * TOKEN_S
    harness.core.scheduler.queues.table.tpot_slo_s[stream.slot] = stream.tpot_slo_s
    stream.first_token_s += banked * TOKEN_S
    length_s = judged(harness).offline_length_s(empty_draft(harness), [], 0.0)
    # A step that holds no more than one token is not shortened any further.
    assert length_s <= max(target, launch + 1) * TOKEN_S


@pytest.mark.parametrize("target_s", [5.0, 3600.0])
def test_offline_work_alone_fills_a_step_however_long_the_targets_are(target_s: float) -> None:
    harness = engine(Launches(20.0), ttft_slo_s=target_s, tpot_slo_s=target_s, max_num_batched_tokens=64)
    assert offline_tokens(harness) == 64


@pytest.mark.parametrize("price", [0.0, 1.5, 1e9])
def test_an_empty_step_has_a_token_at_least_whatever_late_requests_cost(price: float) -> None:
    harness = engine(Launches(1000.0), ttft_slo_s=TOKEN_S, tpot_slo_s=TOKEN_S, late_price_s=price)
    assert offline_tokens(harness) >= 1


@pytest.mark.parametrize(("price", "is_in_time"), [(1000.0, True), (0.0, False)])
def test_offline_work_leaves_a_prompt_in_time_that_goes_on_after_the_step_if_that_is_worth_it(
    price: float, is_in_time: bool
) -> None:
    harness, due_s = engine(Launches(8.0), tpot_slo_s=5.0, late_price_s=price), 5.0
    length_s = judged(harness).offline_length_s(empty_draft(harness), [due_s], 0.0)
    assert length_s > 0.0
    assert (length_s <= due_s) == is_in_time


class FirstAlone(PerToken):
    """By its fit for steps with several prompts, such a step is 20 tokens shorter."""

    def predict(self, shape: BatchShape) -> Prediction:
        saved_s = 20 * TOKEN_S if shape.prefill_requests > 1 else 0.0
        return Prediction(super().predict(shape).seconds - saved_s, 0.0)


def test_offline_work_that_a_fit_says_saves_time_makes_no_prompt_late() -> None:
    harness = engine(FirstAlone(), late_price_s=1000.0)
    harness.core.handle(online("chat", [7] * 100, max_tokens=1, ttft_slo_s=102 * TOKEN_S, tpot_slo_s=50.0))
    assert offline_tokens(harness) <= 2


# ---- late prompts ----


def test_the_oldest_late_prompt_gets_on_under_overload_with_a_hundredth_of_the_time() -> None:
    """Every step's time is asked for by a prompt that can be in time."""
    harness = engine(max_num_batched_tokens=40)
    harness.core.handle(online("late", [7] * 1000, max_tokens=1, ttft_slo_s=TOKEN_S))
    harness.core.handle(online("younger", [6] * 1000, max_tokens=1, ttft_slo_s=TOKEN_S, arrival_s=0.5))
    done = {"late": 0, "younger": 0}
    harness.clock.sleep_until(10.0)
    for step in range(200):
        now_s = harness.clock.now()
        asked = online(f"new{step}", [10 + step] * 40, max_tokens=1, ttft_slo_s=50 * TOKEN_S, arrival_s=now_s)
        harness.core.handle(asked)
        tokens = harness.step()
        for name in done:
            done[name] += tokens.get(name, 0)
    assert done["late"] / (200 * 40) == pytest.approx(LATE_CREDIT, abs=0.006)
    assert done["younger"] == 0


def test_a_prompt_in_time_counts_without_its_cached_tokens_however_many_late_ones_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness, prompt = engine(max_num_seqs=1), list(range(7, 47))
    harness.core.handle(online("first", prompt, max_tokens=1))
    harness.run()
    now_s = harness.clock.now()
    for number in range(LOOK_AHEAD + 1):
        asked = online(f"late{number}", [60 + number] * 8, ttft_slo_s=TOKEN_S, arrival_s=now_s - 1.0)
        harness.core.handle(asked)
    harness.core.handle(online("again", prompt, ttft_slo_s=1e6, arrival_s=now_s))
    seen: list[PendingPrompt] = []
    choose = Judgement.choose

    def look(self: Judgement, draft: Draft, prompts: Sequence[PendingPrompt], late: PendingPrompt | None) -> Choice:
        seen.extend(prompts)
        return choose(self, draft, prompts, late)

    monkeypatch.setattr(Judgement, "choose", look)
    harness.step()
    (found,) = [each for each in seen if each.request.request_id == "again"]
    assert (found.num_tokens, found.context_tokens) == (4, 36)


# ---- whatever the state ----

SOME = judged(with_streams(3))


@settings(max_examples=30)
@given(
    waits_s=st.lists(st.floats(0.0, 10.0), max_size=8).map(sorted),
    lengths_s=st.lists(st.floats(0.0, 20.0), min_size=2, max_size=8).map(sorted),
    ahead_s=st.floats(0.0, 10.0),
)
def test_no_longer_step_makes_fewer_arrivals_late(waits_s: list[float], lengths_s: list[float], ahead_s: float) -> None:
    found = judged(engine())
    found._set_waits(np.array(waits_s), 0.5)
    late = found.late_arrivals(np.array(lengths_s), ahead_s)
    assert (late >= -1e-9).all()
    assert (np.diff(late) >= -1e-9).all()


@given(
    slack_s=st.lists(st.floats(-20.0, 20.0), min_size=3, max_size=3),
    lengths_s=st.lists(st.floats(0.0, 20.0), min_size=2, max_size=8).map(sorted),
    error=st.floats(0.0, 1.0),
    count=st.floats(1.0, 20.0),
)
def test_no_longer_step_makes_fewer_streams_late(
    slack_s: list[float], lengths_s: list[float], error: float, count: float
) -> None:
    lengths = np.array(lengths_s)[:, None]
    first_s = np.array(slack_s) - lengths
    late = SOME.late_streams(first_s, first_s - 0.1 * lengths, count, error * lengths)
    assert math.isfinite(late.sum())
    assert (late >= 0.0).all()
    assert (np.diff(late) >= -1e-9).all()
