"""Records calls of C kernels while they run, and replays them with one call."""

from neaptide.kernels.recording.native import CallRecording, call, empty, scratch

__all__ = ["CallRecording", "call", "empty", "scratch"]
