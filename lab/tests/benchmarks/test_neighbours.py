"""What chats feel of hostile schemas: the attack and the figures."""

import itertools
import json

import httpx
import pytest

from lab.benchmarks.structured import attack
from lab.benchmarks.structured.neighbours import Pair, felt
from neaptide.loadgen.client.recorder import ChatRecord

pytestmark = pytest.mark.usefixtures("few_resamples")


def chat(tpot_ms: float, error: str | None = None) -> ChatRecord:
    return ChatRecord(0.0, token_times_s=[1.0, 1.0 + tpot_ms / 1e3], num_output_tokens=2, error=error)


def test_ratios_are_of_all_turns_together() -> None:
    pairs = [Pair([chat(4.0), chat(6.0)], [chat(5.0), chat(7.0)]), Pair([chat(5.0)], [chat(12.0, "cut")])]
    found = felt(pairs)
    assert found["tpot_p50_ms_alone"] == pytest.approx(5.0)
    assert found["tpot_p50_ms_beside"] == pytest.approx(7.0)
    assert found["tpot_p50_ratio"] == pytest.approx(1.4)
    assert found["tpot_p99_ratio"] == pytest.approx((7.0 + 0.98 * 5.0) / (5.0 + 0.98))
    assert (found["chats"], found["chats_failed"]) == (6, 1)


def test_pairs_that_say_the_same_leave_no_doubt_and_others_do() -> None:
    same = felt([Pair([chat(4.0)], [chat(5.0)])] * 8)
    assert (same["tpot_p99_ratio_low"], same["tpot_p99_ratio_high"]) == (pytest.approx(1.25), pytest.approx(1.25))
    assert same["tpot_p50_ratio_of_halves_alone"] == pytest.approx(1.0)
    mixed = felt([Pair([chat(4.0)], [chat(4.0 + index % 2)]) for index in range(8)])
    assert mixed["tpot_p50_ratio_low"] == pytest.approx(1.0)
    assert mixed["tpot_p50_ratio_high"] == pytest.approx(1.25)


def test_the_halves_alone_show_a_machine_that_changes() -> None:
    found = felt([Pair([chat(4.0)], [chat(4.0)]), Pair([chat(8.0)], [chat(8.0)])])
    assert found["tpot_p50_ratio_of_halves_alone"] == pytest.approx(2.0)
    assert found["tpot_p50_ratio"] == pytest.approx(1.0)


def test_an_attack_goes_on_where_it_left_off_and_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.content)
        return httpx.Response(400)

    ticks = itertools.count()
    monkeypatch.setattr(attack.time, "monotonic", lambda: float(next(ticks)))
    with httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer)) as http:
        one = attack.Attack(http, "held")
        turns = [one.run(10.0) for _ in range(2)]  # three readings of the clock a request
    names = [*itertools.islice(itertools.cycle(attack.KINDS["held"]), len(asked))]
    assert [*itertools.chain(*turns)] == names
    assert all(found == {"statuses": {400: 1}, "longest_s": 1.0} for turn in turns for found in turn.values())
    assert len({*asked}) == len(asked) == 6
    assert b"w1" in asked[0]
    assert all(json.loads(body)["max_tokens"] == 16 for body in asked)
