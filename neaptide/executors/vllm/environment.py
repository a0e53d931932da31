"""What vLLM reads from the environment. No vLLM here: it reads that when it is imported."""

import logging
import os
import sys

logger = logging.getLogger(__name__)

PROMISED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine core lives in this process
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # workers hear whose children they are (``launch.serve``)
    "VLLM_COMPUTE_NANS_IN_LOGITS": "1",  # a request whose logits are none fails, and no other
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # for one position that is never computed
}
"""What is promised rests on these, so an operator's do not count."""


def set_environment(num_threads: int) -> None:
    """What vLLM reads from the environment, before it is imported. What the operator has set stays, ``PROMISED`` apart.

    Args:
        num_threads: for computing; 0 leaves that to vLLM.
    """
    for name, value in PROMISED.items():
        if os.environ.get(name, value) != value:
            logger.warning("%s is %s, whatever the environment says", name, value)
        os.environ[name] = value
    defaults = {
        "VLLM_CONFIGURE_LOGGING": "0",  # its records go the way of ours
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # what it writes past the log
    }
    if num_threads > 0:
        if (said := os.environ.get("OMP_NUM_THREADS")) is None:
            defaults["OMP_NUM_THREADS"] = str(num_threads)
            if (torch := sys.modules.get("torch")) is not None:  # it has read its environment before
                torch.set_num_threads(num_threads)
        elif said != str(num_threads):
            logger.warning("OMP_NUM_THREADS=%s counts, not num_threads = %d", said, num_threads)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # Only warnings: at its start alone vLLM has a hundred lines to say.
    vllm_logger = logging.getLogger("vllm")
    if vllm_logger.level == logging.NOTSET and not logging.getLogger().isEnabledFor(logging.DEBUG):
        vllm_logger.setLevel(logging.WARNING)
