"""Loaded by every Python process that has this directory on its path: the simulated executor dies of one token.

A prompt with ``POISON_ID`` ends the engine process as a fault in native code would.
"""

import os
import signal

from neaptide.engine.steps.plan import StepPlan
from neaptide.executors.simulated.hash_executor import SimExecutor, SimHandle

_submit = SimExecutor.submit


def submit(self: SimExecutor, plan: StepPlan) -> SimHandle:
    poison = int(os.environ["POISON_ID"])
    if any(poison in new.prompt_token_ids for new in plan.new_requests):
        os.kill(os.getpid(), signal.SIGSEGV)
    return _submit(self, plan)


SimExecutor.submit = submit  # type: ignore[method-assign]
