"""Neaptide: live chat and batch jobs on the same GPU or CPU."""

__version__ = "0.2.0"
