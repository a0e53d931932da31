"""What batches, chats and flex requests are charged for the device's time."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from neaptide.engine.config import CacheConfig, SharedReads
from neaptide.engine.interfaces import Prediction
from neaptide.engine.messages import AddBatch, DeviceCharge
from neaptide.engine.record.charges import token_prices
from neaptide.engine.record.step_reporter import StepReporter
from neaptide.engine.steps.plan import BatchShape
from tests.engine.harness import Harness, batch, flex, online

MS = 1e-3
PREFIX = list(range(1, 33))
"""Eight blocks."""


class PricedWork:
    """A prompt's token takes 1 ms, an answer's 2 ms, a cached token that is read 0.1 ms, and each step 3 ms."""

    def predict(self, shape: BatchShape) -> Prediction:
        read = shape.decode_context_tokens + shape.prefill_context_tokens - shape.shared_prefix_tokens
        return Prediction((3 + shape.prefill_tokens + 2 * shape.decode_requests + 0.1 * read) * MS, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Learns nothing."""


class Charged:
    """An engine, and the sums of all that it has charged."""

    def __init__(self, **options: object) -> None:
        self.harness = Harness(cost_model=PricedWork(), **({"num_blocks": 256} | options))  # type: ignore[arg-type]
        self.core = self.harness.core
        self.reporter = StepReporter(self.core.scheduler)
        self.core.subscribe(self.reporter)
        self.sums: dict[tuple[str, str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.busy_s = 0.0
        self.online_s = 0.0
        self.offline_s: dict[str, float] = defaultdict(float)

    def run(self, num_steps: int | None = None) -> None:
        while self.core.has_work and num_steps != 0:
            self.harness.step()
            num_steps = None if num_steps is None else num_steps - 1
            self.take()

    def take(self) -> None:
        report = self.reporter.take(0.0)
        assert not self.reporter.failed
        if report is None:
            return
        self.busy_s += sum(step.busy_s for step in report.steps)
        self.online_s += report.online_s
        for share, seconds in report.offline_s.items():
            self.offline_s[share] += seconds
        for charge in report.charges:
            for name in DeviceCharge.__struct_fields__[3:]:
                self.sums[charge.share, charge.work, charge.batch_id][name] += getattr(charge, name)

    def of_batch(self, batch_id: str) -> dict[str, float]:
        (found,) = (sums for (_, _, name), sums in self.sums.items() if name == batch_id)
        return found

    def total(self, name: str) -> float:
        return sum(sums[name] for sums in self.sums.values())


def shared_batch(directory: Path, batch_id: str, count: int, max_tokens: int = 1, start: int = 100) -> AddBatch:
    """A batch whose lines share the prefix, each with a block of its own after it."""
    return batch(directory, batch_id, [PREFIX + [start + row] * 4 for row in range(count)], max_tokens)


def keyed(message: AddBatch, share: str) -> AddBatch:
    return AddBatch(*(getattr(message, name) for name in message.__struct_fields__[:-1]), share)


def mixed(directory: Path) -> Iterator[object]:
    yield online("chat", [7] * 9, max_tokens=5, share="a", ttft_slo_s=9.0, tpot_slo_s=9.0)
    yield flex("flex", [8] * 9, max_tokens=5, share="b")
    yield keyed(batch(directory, "one", [[9 + row] * 17 for row in range(6)], max_tokens=6), "b")
    yield keyed(shared_batch(directory, "two", 6, max_tokens=3), "c")
    yield online("second", [5] * 21, max_tokens=5, share="a", ttft_slo_s=9.0, tpot_slo_s=9.0)


@pytest.mark.parametrize("overlap_depth", [0, 1])
def test_the_sums_over_all_accounts_are_the_devices_time(tmp_path: Path, overlap_depth: int) -> None:
    charged = Charged(max_num_batched_tokens=24, overlap_depth=overlap_depth)
    for message in mixed(tmp_path):
        charged.core.handle(message)  # type: ignore[arg-type]
    charged.run()
    assert set(charged.sums) == {("a", "chats", ""), ("b", "flex", ""), ("b", "batch", "one"), ("c", "batch", "two")}
    assert charged.total("device_s") == pytest.approx(charged.busy_s)
    assert charged.total("computed_s") == pytest.approx(charged.busy_s)
    assert charged.sums["a", "chats", ""]["computed_s"] == pytest.approx(charged.online_s)
    b_s = charged.sums["b", "flex", ""]["computed_s"] + charged.of_batch("one")["computed_s"]
    assert charged.offline_s["b"] == pytest.approx(b_s)
    assert charged.total("prefill_tokens") == pytest.approx(charged.total("computed_tokens"))
    assert charged.of_batch("one")["computed_tokens"] == 6 * 17
    assert charged.of_batch("one")["decode_tokens"] == 6 * 5
    assert all(sums["device_s"] > 0 for sums in charged.sums.values())


def test_a_prefix_that_one_line_computed_is_split_among_all_its_readers(tmp_path: Path) -> None:
    """A line of one batch computes it, 199 lines of another read it: a two-hundredth each."""
    charged = Charged(num_blocks=1024, max_num_seqs=16)
    charged.core.handle(shared_batch(tmp_path, "one", 1, max_tokens=400))
    charged.run(2)
    assert charged.of_batch("one")["prefill_tokens"] == 36
    charged.core.handle(shared_batch(tmp_path, "two", 199, start=200))
    charged.run()
    one, two = charged.of_batch("one"), charged.of_batch("two")
    assert (one["computed_tokens"], two["computed_tokens"]) == (36, 199 * 4)
    assert (one["cached_tokens"], two["cached_tokens"]) == (0, 199 * 32)
    assert one["prefill_tokens"] == pytest.approx(4 + 32 / 200)
    assert two["prefill_tokens"] == pytest.approx(199 * (4 + 32 / 200))
    assert charged.total("device_s") == pytest.approx(charged.busy_s)
    assert one["computed_s"] - one["device_s"] == pytest.approx(two["device_s"] - two["computed_s"])
    assert one["computed_s"] > one["device_s"]


def test_a_batch_that_has_ended_is_settled(tmp_path: Path) -> None:
    charged = Charged()
    charged.core.handle(shared_batch(tmp_path, "one", 1))
    charged.run()
    charged.core.handle(shared_batch(tmp_path, "two", 9, start=200))
    charged.run()
    assert charged.of_batch("one")["prefill_tokens"] == 36
    assert charged.of_batch("two")["prefill_tokens"] == pytest.approx(9 * 4)


def test_lines_of_one_step_split_the_prefix_that_one_of_them_computes(tmp_path: Path) -> None:
    charged = Charged()
    rows = [PREFIX + [row] * 4 for row in (50, 60)]
    one, two = batch(tmp_path, "one", rows[:1], 9), batch(tmp_path, "two", rows[1:], 9)
    charged.core.handle(one)
    charged.core.handle(two)
    charged.run()
    assert charged.total("computed_tokens") == 32 + 8
    assert [charged.of_batch(name)["prefill_tokens"] for name in ("one", "two")] == pytest.approx([20, 20])


def test_chats_and_batches_of_a_key_share_a_prefix(tmp_path: Path) -> None:
    charged = Charged()
    charged.core.handle(keyed(shared_batch(tmp_path, "one", 1, max_tokens=9), "a"))
    charged.run(2)
    charged.core.handle(online("chat", [*PREFIX, 7, 7], max_tokens=1, share="a"))
    charged.run()
    assert charged.of_batch("one")["prefill_tokens"] == pytest.approx(4 + 16)
    assert charged.sums["a", "chats", ""]["prefill_tokens"] == pytest.approx(2 + 16)


def test_a_preempted_line_computes_again_and_reads_its_prefix_once(tmp_path: Path) -> None:
    charged = Charged(num_blocks=24, headroom_ratio=0.0)
    charged.core.handle(batch(tmp_path, "one", [[3] * 30, [4] * 30], max_tokens=12))
    charged.run(3)
    charged.core.handle(online("chat", [7] * 30, max_tokens=20, ttft_slo_s=0.05))
    charged.run()
    one = charged.of_batch("one")
    assert one["num_preemptions"] == sum(
        output.num_preemptions for name, (output,) in charged.harness.ends.items() if name.startswith("one")
    )
    assert one["num_preemptions"] > 0
    assert one["recomputed_tokens"] > 0
    assert one["prefill_tokens"] == pytest.approx(one["computed_tokens"])
    assert charged.total("device_s") == pytest.approx(charged.busy_s)


def test_a_line_that_returns_reads_no_prefix_a_second_time(tmp_path: Path) -> None:
    charged = Charged(num_blocks=24)
    charged.core.handle(shared_batch(tmp_path, "one", 1, max_tokens=20))
    charged.run(1)
    charged.core.handle(shared_batch(tmp_path, "two", 1, max_tokens=20, start=200))
    charged.run(2)
    assert charged.of_batch("one")["prefill_tokens"] == pytest.approx(4 + 16)
    charged.core.handle(online("chat", [7] * 48, max_tokens=2, ttft_slo_s=0.05))
    charged.run()
    assert charged.of_batch("two")["num_preemptions"] == 1
    assert charged.of_batch("one")["prefill_tokens"] == pytest.approx(4 + 16)


def test_reads_that_serve_several_decodes_are_split_among_them(tmp_path: Path) -> None:
    """Three lines read a prefix of 32 tokens at once, one has no prefix: it pays for its own reads alone."""
    reads = SharedReads(min_tokens=8, decodes_per_read=8)
    charged = Charged(cache=CacheConfig(block_size=4, shared_reads=reads))
    charged.core.handle(shared_batch(tmp_path, "one", 1, max_tokens=9))
    charged.run(1)
    charged.core.handle(shared_batch(tmp_path, "two", 2, max_tokens=4, start=200))
    charged.core.handle(batch(tmp_path, "three", [[6] * 36], max_tokens=4))
    charged.run(2)
    before = {name: charged.of_batch(name)["computed_s"] for name in ("one", "two", "three")}
    charged.run(1)
    spent = {name: charged.of_batch(name)["computed_s"] - before[name] for name in before}
    assert spent["two"] / spent["three"] == pytest.approx(2 * (2 + 0.1 * (38 - 64 / 3)) / (2 + 0.1 * 38), rel=0.02)


def test_prices_are_those_of_the_cost_model() -> None:
    prices = token_prices(Charged().core.scheduler)
    assert prices == pytest.approx((1 * MS, 2 * MS, 0.0, 0.1 * MS), abs=1e-9)


def test_a_model_that_knows_no_tokens_charges_tokens_alike() -> None:
    prices = token_prices(Harness().core.scheduler)
    assert prices == (1.0, 1.0, 0.0, 0.0)


def test_accounts_of_ended_batches_are_forgotten(tmp_path: Path) -> None:
    charged = Charged()
    for number in range(20):
        charged.core.handle(batch(tmp_path, f"b{number}", [[5] * 6], 2))
        charged.run()
        charged.take()
    charges = charged.reporter._charges
    assert (len(charges._accounts), len(charges._of_batch), len(charges._numbered)) == (0, 0, 1)
