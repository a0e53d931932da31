"""Records calls of C kernels while they run, and replays them with one call."""

from neaptide.kernels.recording.native import Recording, call, empty, scratch

__all__ = ["Recording", "call", "empty", "scratch"]
