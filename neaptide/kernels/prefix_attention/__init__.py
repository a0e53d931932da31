"""Attention that reads shared prefixes once, on devices that Triton compiles for. Only ``attention``, ``kernel`` and
``trial`` import Triton."""
