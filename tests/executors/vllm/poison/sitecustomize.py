"""Read by every Python process that has this directory on its path: vLLM's workers die, or raise, of one token.

``POISON_ID`` says of which, if it is in a prompt; ``POISON_RANK`` names the rank. ``POISON_HOW`` is ``dies``, as of
a fault in native code, ``raises``, or ``raises late``: in its sampler, when the ranks have nothing more to tell each
other in the step. Of vLLM nothing is imported here: its runner is changed when vLLM imports it.
"""

import importlib.abc
import importlib.machinery
import os
import signal
import sys
from types import ModuleType
from typing import Any

RUNNER = "vllm.v1.worker.gpu_model_runner"


def poison(module: Any) -> None:
    token, rank = int(os.environ["POISON_ID"]), int(os.environ.get("POISON_RANK", "0"))
    execute, sample = module.GPUModelRunner.execute_model, module.GPUModelRunner._sample
    how = os.environ["POISON_HOW"]
    poisoned: set[str] = set()
    is_due = False

    def execute_model(runner: Any, order: Any, *args: Any, **named: Any) -> Any:
        nonlocal is_due
        poisoned.update(new.req_id for new in order.scheduled_new_reqs if token in new.prompt_token_ids)
        is_due = runner.parallel_config.rank == rank and bool(poisoned.intersection(order.num_scheduled_tokens))
        if is_due and how == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if is_due and how == "raises":
            raise RuntimeError("poisoned")
        return execute(runner, order, *args, **named)

    def _sample(*args: Any, **named: Any) -> Any:
        if is_due and how == "raises late":
            raise RuntimeError("poisoned")
        return sample(*args, **named)

    module.GPUModelRunner.execute_model = execute_model
    module.GPUModelRunner._sample = _sample


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != RUNNER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            poison(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
