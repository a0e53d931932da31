"""Neaptide: real-time chat and batch files served from the same accelerator."""

__version__ = "0.1.0"
