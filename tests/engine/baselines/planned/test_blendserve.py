"""BlendServe: both ends of the order at work together, prompts paced once memory is full."""

from pathlib import Path

from neaptide.engine.scheduler.residual import LEAST_PACED_TOKENS
from tests.engine.harness import Harness, batch
from tests.engine.offline.planning.orders import plan, two_ends


def blendserve(**fields: object) -> Harness:
    return Harness(**({"policy": "blendserve"} | fields))  # type: ignore[arg-type]


def test_both_ends_fill_their_parts_of_the_memory(tmp_path: Path) -> None:
    harness = blendserve(max_num_seqs=4)
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


def test_prompts_are_paced_once_memory_is_full(tmp_path: Path) -> None:
    """Of 2,000 blocks 100 are free: the next prompts come at the least pace, not as many as fit."""
    harness = blendserve(num_blocks=2000, max_num_batched_tokens=8192, max_num_seqs=64)
    long = batch(tmp_path, "long", [[row + 5] * 3800 for row in range(2)], max_tokens=8)
    more = batch(tmp_path, "more", [[row + 50] * 100 for row in range(40)], max_tokens=1)
    harness.core.handle(long)
    assert harness.step() == {"long:0": 3800, "long:1": 3800}
    harness.core.handle(more)
    order = [("more", row) for row in range(40)]
    harness.core.handle(plan(*order, ends=two_ends([100] * 40, [1.0] * 40, 1.0)))
    tokens = harness.step()
    assert sum(tokens.values()) == 2 + LEAST_PACED_TOKENS
