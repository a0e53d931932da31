"""vLLM's second runner on a CPU without a Triton back end, its kernels interpreted: VLLM_USE_V2_MODEL_RUNNER=1 and
TRITON_INTERPRET=1, both read on import, and what is done here before any process imports vLLM."""

import os
from pathlib import Path


def is_wanted() -> bool:
    return os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"


def pretend_a_back_end() -> None:
    """vLLM asks whether Triton has one for CPUs before it lets kernels be."""
    from types import SimpleNamespace

    import triton.backends

    triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


def stand_in_for_kernels() -> None:
    """For those that the interpreter does not run: one that counts NaN, and a function that draws of 0.30 call. Those
    of masks and of the likeliest tokens have none: the warm-up does without them."""
    import msgspec
    import triton.language as tl
    import vllm.v1.worker.gpu.metrics.logits as metrics
    from vllm.triton_utils import tldevice

    from neaptide.executors.vllm import warm_up

    warm_up.CHOSEN = msgspec.structs.replace(warm_up.CHOSEN, grammar="", top_k=0, top_p=1.0)
    metrics.get_num_nans = lambda logits: logits.isnan().sum(-1).int()
    tldevice.log1p = lambda x: tl.log(x.to(tl.float64) + 1.0).to(tl.float32)


def prepare_ranks() -> None:
    """Each is a process of its own, which starts with ``workers`` on its path. What ranks need to embed tokens vLLM
    compiles even when it is told to be eager, and the pretended back end compiles nothing."""
    workers = str(Path(__file__).with_name("workers"))
    os.environ["PYTHONPATH"] = os.pathsep.join([workers, os.environ["PYTHONPATH"]])
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
