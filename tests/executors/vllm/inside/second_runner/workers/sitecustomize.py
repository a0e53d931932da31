"""Read by Python when it starts: a rank's process is prepared before it imports vLLM, as the tests' own is."""

import sys

if any("spawn_main" in argument for argument in sys.orig_argv):
    from tests.executors.vllm.inside import second_runner

    second_runner.pretend_a_back_end()
    second_runner.stand_in_for_kernels()
