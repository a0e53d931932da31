"""Environment variables for vLLM. Does not import vLLM, which reads them on import."""

import logging
import os
import sys

logger = logging.getLogger(__name__)

PROMISED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # workers learn which process is their parent (``launch.serve``)
    "VLLM_COMPUTE_NANS_IN_LOGITS": "1",  # a request with NaN logits fails alone
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # for one position that is never computed
}
"""Our guarantees depend on these, so they override the operator's values."""


def set_environment(num_threads: int) -> None:
    """Sets the variables before vLLM is imported. The operator's values stay, except for ``PROMISED``.

    Args:
        num_threads: compute threads; 0 leaves the choice to vLLM.
    """
    for name, value in PROMISED.items():
        if os.environ.get(name, value) != value:
            logger.warning("%s is set to %s; the environment's value is ignored", name, value)
        os.environ[name] = value
    defaults = {
        "VLLM_CONFIGURE_LOGGING": "0",  # its log records are handled by our loggers
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it writes to stderr past the log
    }
    if num_threads > 0:
        if (said := os.environ.get("OMP_NUM_THREADS")) is None:
            defaults["OMP_NUM_THREADS"] = str(num_threads)
            if (torch := sys.modules.get("torch")) is not None:  # torch has already read its environment
                torch.set_num_threads(num_threads)
        elif said != str(num_threads):
            logger.warning("OMP_NUM_THREADS=%s overrides num_threads = %d", said, num_threads)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # Warnings only: vLLM logs a hundred lines at start.
    vllm_logger = logging.getLogger("vllm")
    if vllm_logger.level == logging.NOTSET and not logging.getLogger().isEnabledFor(logging.DEBUG):
        vllm_logger.setLevel(logging.WARNING)
