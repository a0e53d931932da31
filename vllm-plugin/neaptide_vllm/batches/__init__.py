"""Files and batches in the API process of ``vllm serve``: ``VLLM_PLUGINS=neaptide_batches``.

vLLM loads both functions by their entry points. Nothing else is imported before they are called, because the second is
called in every process of vLLM.
"""

import multiprocessing
import os
from typing import Any


def plugin() -> Any:
    """The endpoint plug-in, in the API process."""
    from neaptide_vllm.batches.plugin import BatchesPlugin

    return BatchesPlugin()


def tie_to_parent() -> None:
    """Lets the engine and its workers end with the process that started them.

    vLLM leaves them running, with the device's memory, if its API process is killed. A process without a parent of
    vLLM's is left alone: its parent is a shell or a service manager.
    """
    from neaptide.engine.process.parent import end_with_parent

    parent = multiprocessing.parent_process()
    # A fork server's child has the server as its parent, which ends with vLLM by itself.
    if parent is not None and parent.pid == os.getppid():
        end_with_parent(parent.pid)
