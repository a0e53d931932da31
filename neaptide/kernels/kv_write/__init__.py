"""Rotates queries and keys, and writes keys and values to their cache slots.

Only ``kernel`` and ``launch`` import Triton.
"""
