"""Quotes of batches against what happens: by the fluid model on the real loads, and by whole replays."""
