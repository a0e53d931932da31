"""BlendServe: both ends of the order at work together, prompts paced."""

from pathlib import Path

from neaptide.engine.scheduler.residual import LEAST_PACED_TOKENS
from tests.engine.harness import Harness, batch
from tests.engine.offline.planning.orders import plan, two_ends


def blendserve(**fields: object) -> Harness:
    return Harness(**({"policy": "blendserve"} | fields))  # type: ignore[arg-type]


def test_both_ends_fill_their_parts_of_the_memory(tmp_path: Path) -> None:
    harness = blendserve(max_num_seqs=4, num_blocks=1000)
    harness.core.handle(batch(tmp_path, "job", [[row + 5] * 4 for row in range(8)], max_tokens=3))
    ends = two_ends([10] * 8, [3.0] * 4 + [1.0] * 4, root_density=2.0)
    harness.core.handle(plan(*(("job", row) for row in range(8)), ends=ends))
    assert list(harness.step()) == ["job:7", "job:0", "job:6", "job:1"]


def test_an_end_whose_requests_end_early_gets_more(tmp_path: Path) -> None:
    harness = blendserve(max_num_seqs=2)
    message = batch(tmp_path, "job", [[row + 5] * 4 for row in range(8)], max_tokens=1)
    message.params_table.append(type(message.params_table[0])(max_tokens=20))
    message.params_index[4:] = [1] * 4
    harness.core.handle(message)
    harness.core.handle(plan(*(("job", row) for row in range(8)), ends=two_ends([10] * 8, [3.0] * 4 + [1.0] * 4, 2.0)))
    starts = [name for event, name in (harness.run() and harness.log) if event == "start"]
    # job:7 runs on while its end has its part; the left end's rows follow each other beside it.
    assert starts[:5] == ["job:7", "job:0", "job:1", "job:2", "job:3"]


def test_prompts_are_paced_as_if_memory_were_full(tmp_path: Path) -> None:
    """Algorithm 3 knows the memory, not what is held of it: 32,000 tokens read in 0.032 s want 32 tokens of 1 ms."""
    harness = blendserve(num_blocks=2000, max_num_batched_tokens=8192, max_num_seqs=64)
    kv_tokens = harness.core.scheduler.kv.num_blocks * harness.core.scheduler.kv.block_size
    harness.core.handle(batch(tmp_path, "more", [[row + 50] * 100 for row in range(40)], max_tokens=1))
    order = [("more", row) for row in range(40)]
    density = 500_000 / kv_tokens
    harness.core.handle(plan(*order, ends=two_ends([100] * 40, [density] * 40, density)))
    assert sum(harness.step().values()) == 500
    harness.core.handle(plan(*order, ends=two_ends([100] * 40, [1e-6] * 40, 1e-6)))
    assert sum(harness.step().values()) == LEAST_PACED_TOKENS
