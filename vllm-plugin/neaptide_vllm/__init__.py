"""Neaptide inside ``vllm serve``: the scheduler of vLLM with latency targets, and batch files in its API server.

vLLM loads ``--scheduler-cls neaptide_vllm.scheduler`` as an attribute of this package, and calls it.
"""

from typing import Any

__version__ = "0.2.0"


def scheduler(vllm_config: Any, **parts: Any) -> Any:
    """The scheduler of ``--scheduler-cls neaptide_vllm.scheduler``. vLLM is imported only when it is made."""
    from neaptide_vllm.scheduling.factory import make_scheduler

    return make_scheduler(vllm_config, **parts)
