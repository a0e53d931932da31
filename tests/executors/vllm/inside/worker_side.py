"""What tests do inside vLLM's workers: in this process, or in one for each rank, which imports it there."""

from collections.abc import Sequence
from typing import Any

import psutil
import torch

MOST_DEPTH = 4
"""Objects of vLLM's below a runner that are measured: its batch, that one's block tables, their buffers."""


def known_requests(worker: Any) -> set[str]:
    found = worker.model_runner
    return set(found.req_states.req_id_to_index if hasattr(found, "req_states") else found.requests)


def spoil(worker: Any, num_blocks: int, block_ids: list[int]) -> None:
    """Writes NaN where keys and values stand.

    Args:
        num_blocks: of the whole cache.
    """
    for cache in worker.model_runner.kv_caches:
        dim = next(d for d, size in enumerate(cache.shape) if size % num_blocks == 0)
        for block in block_ids:
            cache.narrow(dim, block, 1).fill_(torch.nan)


def sizes(worker: Any) -> dict[str, int]:
    """Of everything that the runner keeps."""
    return measure(worker.model_runner, "runner", "vllm.")


def measure(owner: Any, name: str, package: str) -> dict[str, int]:
    """How many entries are in each container that an object holds, and bytes in each array; also in what it holds of
    its package's objects, but for models."""
    found: dict[str, int] = {}
    seen: set[int] = set()

    def look(value: Any, path: str, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = value.nbytes
        elif hasattr(value, "nbytes") and hasattr(value, "dtype"):
            found[path] = int(value.nbytes)
        elif isinstance(value, dict | list | set | tuple):
            found[path] = len(value)
            if isinstance(value, list | tuple) and depth < MOST_DEPTH:
                for index, part in enumerate(value):
                    if type(part).__module__.startswith(package):
                        look(part, f"{path}[{index}]", depth + 1)
        elif type(value).__module__.startswith(package) and not isinstance(value, torch.nn.Module):
            if id(value) in seen or depth == MOST_DEPTH:
                return
            seen.add(id(value))
            for attribute, part in attributes(value).items():
                look(part, f"{path}.{attribute}", depth + 1)

    look(owner, name, 0)
    return found


def attributes(owner: Any) -> dict[str, Any]:
    """Those with slots, too."""
    names = [name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(owner, name) for name in names if hasattr(owner, name)} | getattr(owner, "__dict__", {})


def missing(owner: Any, paths: Sequence[str]) -> list[str]:
    """Those of the attributes of attributes that are not there."""
    return [path for path in paths if not _has(owner, path)]


def missing_in_runner(worker: Any, paths: Sequence[str]) -> list[str]:
    return missing(worker.model_runner, paths)


def _has(owner: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


def generators(worker: Any, request_id: str) -> list[bool]:
    """Whether the V1 runner has one where a request with a seed has its own: with the request, and in its batch."""
    runner = worker.model_runner
    index = runner.input_batch.req_id_to_index[request_id]
    held = (runner.requests[request_id].generator, runner.input_batch.generators.get(index))
    return [isinstance(generator, torch.Generator) for generator in held]


def resident_bytes(worker: Any) -> int:
    """Of its process."""
    return int(psutil.Process().memory_info().rss)


# ---- letting them raise ----


def poison(worker: Any, request_id: str, where: str) -> None:
    """This worker's runner raises in every step of the request: before its forward pass, between it and sampling, or
    after both."""
    runner = worker.model_runner
    execute, sample = runner.execute_model, runner.sample_tokens
    state = runner.neaptide_poison = {"due": False, "raised": 0}

    def check(here: str) -> None:
        if state["due"] and here == where:
            state["due"] = False
            state["raised"] += 1
            raise RuntimeError("poisoned")

    def execute_model(order: Any, *args: Any, **named: Any) -> Any:
        state["due"] = request_id in order.num_scheduled_tokens
        check("before")
        answer = execute(order, *args, **named)
        check("between")
        return answer

    def sample_tokens(*args: Any, **named: Any) -> Any:
        answer = sample(*args, **named)
        check("after")
        return answer

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


def cure(worker: Any) -> int:
    """Undoes that; returns how often it raised."""
    runner = worker.model_runner
    del runner.execute_model, runner.sample_tokens
    return int(runner.__dict__.pop("neaptide_poison")["raised"])
