"""Calls of kernels in C that are noted while they run, and repeated by one call."""

from neaptide.kernels.recording.native import Recording, call, empty, scratch

__all__ = ["Recording", "call", "empty", "scratch"]
