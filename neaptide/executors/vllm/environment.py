"""What vLLM reads from the environment. No vLLM here: it reads that when it is imported."""

import logging
import os
import sys


def set_environment(num_threads: int) -> None:
    """What vLLM reads from the environment, before it is imported; what the operator has set stays."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine core lives in this process
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # workers hear whose children they are (``launch.serve``)
        "VLLM_COMPUTE_NANS_IN_LOGITS": "1",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # for one position that is never computed
        "VLLM_CONFIGURE_LOGGING": "0",  # its records go the way of ours
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # what it writes past the log
    }
    if num_threads > 0:
        defaults["OMP_NUM_THREADS"] = str(num_threads)
        torch = sys.modules.get("torch")
        if torch is not None and "OMP_NUM_THREADS" not in os.environ:  # it has read its environment before
            torch.set_num_threads(num_threads)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # Only warnings: at its start alone vLLM has a hundred lines to say.
    vllm_logger = logging.getLogger("vllm")
    if vllm_logger.level == logging.NOTSET and not logging.getLogger().isEnabledFor(logging.DEBUG):
        vllm_logger.setLevel(logging.WARNING)
