"""Turns recorded or generated requests into a pool for the offline planner."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from neaptide.engine.arrays import FloatArray
from neaptide.engine.offline.planning.plan import PromptPool
from neaptide.engine.offline.planning.prompts import Prompts
from neaptide.engine.offline.token_file import TokenFile, TokenFileWriter
from neaptide.estimator.density import density_model
from neaptide.estimator.device_profile import DeviceProfile
from neaptide.executors.simulated.trace_executor import PROMPT_VOCABULARY
from neaptide.loadgen.workloads.traces import TraceRequest, token_ids


def true_outputs(requests: Sequence[TraceRequest]) -> FloatArray:
    return np.array([request.output_tokens for request in requests], np.float64)


def prompts_of(sets: Sequence[Sequence[TraceRequest]]) -> Prompts:
    """Token files of the sets, each a job of its own, all with the same salt.

    The files are deleted; mapped data stay until they are unmapped.

    Raises:
        OSError: the files cannot be written.
    """
    with TemporaryDirectory(prefix="neaptide-plan-") as directory:
        files = []
        for number, requests in enumerate(sets):
            stem = Path(directory, str(number))
            with TokenFileWriter(stem, is_durable=False) as writer:
                for request in requests:
                    writer.append(token_ids(request.segments, PROMPT_VOCABULARY))
            files.append(TokenFile(stem))
        return Prompts(files)


def pool_of(
    requests: Sequence[TraceRequest],
    profile: DeviceProfile,
    output_tokens: FloatArray | None = None,
    prompts: Prompts | None = None,
) -> PromptPool:
    """The pool of these requests on a device.

    Args:
        output_tokens: known or estimated lengths; None uses the true ones.
        prompts: of these requests, if already made.
    """
    outputs = true_outputs(requests) if output_tokens is None else output_tokens
    prompts = prompts_of([requests]) if prompts is None else prompts
    return PromptPool.of(prompts, outputs, density_model(profile), profile.kv_capacity_tokens, profile.block_size)
