"""Neaptide's scheduler inside vLLM, measured in virtual time."""
