"""Pools of prompts for tests of the planner, by their lengths and what they share."""

from itertools import count
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from neaptide.engine.offline.density import DensityModel
from neaptide.engine.offline.planning.plan import PromptPool
from tests.engine.offline.planning.files import Prompt, pool

MODEL = DensityModel.in_seconds(token_s=1e-4, kv_token_s=1e-7)
"""A token of matrix products takes as long as reading 1,000 cached ones."""

PROMPTS = st.lists(
    st.builds(
        lambda units, own: [unit for unit in units for _ in range(16)] + own,
        st.lists(st.sampled_from([1, 2, 3]), max_size=4),
        st.lists(st.integers(5, 6), min_size=1, max_size=3),
    ),
    max_size=12,
)
OUTPUTS = st.lists(st.sampled_from([1, 2, 50, 4000]), min_size=12, max_size=12)


def made(
    directory: Path, prompts: list[Prompt], outputs: list[int], kv_tokens: int = 100_000, unit_tokens: int = 16
) -> PromptPool:
    lengths = np.array(outputs[: len(prompts)], float)
    return PromptPool.of(pool(directory, [prompts]), lengths, MODEL, kv_tokens, unit_tokens)


def grouped(*groups: tuple[int, int, int]) -> list[Prompt]:
    """Groups of (prompts, shared tokens, own tokens); no token of a group is another's."""
    fresh = count(10)
    found: list[Prompt] = []
    for num_prompts, shared, own in groups:
        head = next(fresh)
        found += [[head] * shared + [next(fresh)] * own for _ in range(num_prompts)]
    return found
