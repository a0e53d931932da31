"""Attention that reads shared prefixes once, on devices that Triton supports.

Only ``attention``, ``kernel`` and ``trial`` import Triton.
"""
