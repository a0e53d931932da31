"""What lies in ``inside`` imports vLLM: it is run by ``test_vllm.py`` in vLLM's interpreter."""

collect_ignore = ["inside"]
