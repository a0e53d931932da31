"""Token files for tests of the planner."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from neaptide.engine.arrays import TokenArray
from neaptide.engine.offline.planning.prompts import Prompts
from neaptide.engine.offline.token_file import TokenFile, TokenFileWriter

Prompt = list[int]


def written(directory: Path, rows: Iterable[Prompt | TokenArray], name: str = "job") -> TokenFile:
    with TokenFileWriter(directory / name, is_durable=False) as writer:
        for prompt in rows:
            writer.append(prompt)
    return TokenFile(directory / name)


def pool(directory: Path, jobs: Sequence[Sequence[Prompt | TokenArray]], salts: Sequence[str] | None = None) -> Prompts:
    return Prompts([written(directory, rows, f"job{k}") for k, rows in enumerate(jobs)], salts)


def shared(one: Prompt, other: Prompt) -> int:
    length = min(len(one), len(other))
    return next((k for k in range(length) if one[k] != other[k]), length)


def random_tokens(rng: np.random.Generator, count: int) -> TokenArray:
    return rng.integers(0, 100_000, count, dtype=np.int32)
