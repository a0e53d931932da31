"""The shrinker keeps the property."""

from dataclasses import replace

from neaptide_lab.adversary.case import Case, Chats, Rows
from neaptide_lab.adversary.shrink import shrunk, size_of

LARGE = Case(
    profile="a100-40g-llama-3.1-8b",
    ttft_s=0.83,
    tpot_s=0.047,
    duration_s=23.0,
    kv_blocks=1700,
    scale=1.17,
    noise=0.15,
    rare_every=100,
    rare_factor=3.7,
    seed=713,
    chats=(
        Chats(70, 0.13, 1234, 57, is_poisson=True, spread=0.5, cancelled=0.2, cancel_after_s=1.3),
        Chats(30, 0.31, 777, 3, start_s=2.3, burst=2, turns=3, think_s=1.9, prefix_tokens=340),
    ),
    rows=(Rows(50, 2345, 67, tenant=1), Rows(40, 345, 167, tenant=2, cancel_at_s=7.0)),
)


def test_it_shrinks_a_planted_case_to_what_breaks_it() -> None:
    def is_broken(case: Case) -> bool:
        return sum(group.count for group in case.chats if group.output_tokens < 5) >= 10 and bool(case.rows)

    small = shrunk(LARGE, is_broken, most_tries=2000)
    assert is_broken(small)
    (chats,), (job,) = small.chats, small.rows
    assert 10 <= chats.count <= 13
    assert (chats.turns, chats.burst, chats.prefix_tokens, chats.start_s) == (1, 1, 0, 0.0)
    assert job.count == 1
    assert job.tenant == 0
    assert (small.scale, small.noise, small.rare_every, small.kv_blocks, small.seed) == (1.0, 0.0, 0, None, 0)
    assert small.ttft_s == 0.8


def test_every_step_keeps_it_broken_and_makes_it_smaller() -> None:
    kept: list[Case] = [LARGE]

    def is_broken(case: Case) -> bool:
        broken = case.num_requests % 7 != 0 and case.noise > 0
        if broken:
            assert size_of(case) < size_of(kept[-1])
            kept.append(case)
        return broken

    assert shrunk(LARGE, is_broken, most_tries=2000) == kept[-1]
    assert kept[-1].noise > 0


def test_what_cannot_be_made_smaller_stays() -> None:
    case = replace(LARGE, chats=(), rows=(Rows(1, 1, 1),), duration_s=1.0, ttft_s=1.0, tpot_s=1.0)
    assert shrunk(case, lambda smaller: smaller == case) == case


def test_it_ends_after_so_many_tries() -> None:
    tries = 0

    def is_broken(case: Case) -> bool:
        nonlocal tries
        tries += 1
        return True

    shrunk(LARGE, is_broken, most_tries=5)
    assert tries == 5
