"""Shares of the offline work, by what keys get of it while they have some."""

import zlib
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from neaptide.engine.config import CacheConfig
from neaptide.engine.messages import SetShareWeights
from neaptide.engine.offline.sharing import tenant_account
from tests.engine.harness import Harness, batch

ROW_TOKENS = 64
"""Also the length of a turn, so that a short run has many."""
WEIGHTS = {"key8": 2.0, "key9": 3.0}


def harness_for(**scheduler: object) -> Harness:
    return Harness(
        num_blocks=64,
        cache=CacheConfig(block_size=64),
        max_num_batched_tokens=8 * ROW_TOKENS,
        ttft_slo_s=100.0,
        **scheduler,
    )


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_account, "QUANTUM_TOKENS", ROW_TOKENS)


def submit(
    harness: Harness,
    directory: Path,
    name: str,
    rows: int,
    share: str,
    num_tokens: int = ROW_TOKENS,
    max_tokens: int = 1,
) -> None:
    first = zlib.crc32(name.encode()) % 1_000_000
    prompts = [[first + row] * num_tokens for row in range(rows)]
    harness.core.handle(msgspec.structs.replace(batch(directory, name, prompts, max_tokens), share=share))


@pytest.mark.parametrize("weights", [{}, WEIGHTS])
def test_each_of_ten_keys_has_its_share_though_one_is_greedy(weights: dict[str, float], tmp_path: Path) -> None:
    harness = harness_for(share_weights=weights)
    for k in range(10):
        for job in range(4 if k == 0 else 1):
            submit(harness, tmp_path, f"key{k}job{job}", 200, f"key{k}")
    for _ in range(100):
        harness.step()
    served = Counter(request_id.partition("job")[0] for event, request_id in harness.log if event == "end")
    total_weight = sum(weights.get(f"key{k}", 1.0) for k in range(10))
    for k in range(10):
        share = weights.get(f"key{k}", 1.0) / total_weight
        assert served[f"key{k}"] / served.total() == pytest.approx(share, rel=0.1)


def test_a_small_job_beside_a_huge_one_ends_within_twice_its_shares_time(tmp_path: Path) -> None:
    harness = harness_for()
    submit(harness, tmp_path, "huge", 400, "")
    harness.step()
    submit(harness, tmp_path, "small", 10, "")
    begun_s = harness.clock.now()
    while sum(request_id.startswith("small") for event, request_id in harness.log if event == "end") < 10:
        harness.step()
    rows_a_second = 8 / 0.01
    assert harness.clock.now() - begun_s <= 2 * 10 / (rows_a_second / 2) + 0.02


def test_long_answers_do_not_take_every_seat_before_they_are_charged_for(tmp_path: Path) -> None:
    """Eight seats: prompts of 8 tokens and answers of 50, beside prompts of 100 and answers of 2."""
    harness = Harness(num_blocks=240, max_num_seqs=8, max_num_batched_tokens=512, ttft_slo_s=100.0)
    submit(harness, tmp_path, "answers", 100, "a", num_tokens=8, max_tokens=50)
    submit(harness, tmp_path, "prompts", 100, "b", num_tokens=100, max_tokens=2)
    tokens = Counter[str]()
    for _ in range(240):
        for name, num_tokens in harness.step().items():
            tokens[name.partition(":")[0]] += num_tokens
    assert tokens["prompts"] == pytest.approx(tokens["answers"], rel=0.25)


def ends_of(harness: Harness) -> Counter[str]:
    return Counter(request_id.partition("job")[0] for event, request_id in harness.log if event == "end")


def test_new_weights_count_from_then_on_and_change_no_debt(tmp_path: Path) -> None:
    harness = harness_for(share_weights={"a": 3.0})
    for share in ("a", "b"):
        submit(harness, tmp_path, f"{share}job", 700, share)
    for _ in range(40):
        harness.step()
    before = ends_of(harness)
    assert before["a"] / before["b"] == pytest.approx(3.0, rel=0.1)
    harness.core.handle(SetShareWeights({"b": 3.0}))
    for _ in range(40):
        harness.step()
    after = ends_of(harness) - before
    assert after["b"] / after["a"] == pytest.approx(3.0, rel=0.1)
