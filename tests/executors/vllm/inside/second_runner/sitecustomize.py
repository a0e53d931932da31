"""Imported by every Python process that has this folder on its path, vLLM's workers among them."""

from tests.executors.vllm.inside import second_runner

if second_runner.is_wanted():
    second_runner.pretend_a_back_end()
