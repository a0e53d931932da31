"""Measures the online load of an engine: the share of its time that its online targets need."""

from collections import deque

LOAD_WINDOW_S = 10.0
"""Window over which prompts count as load."""


class LoadMeter:
    """Adds the prompts of the last ``LOAD_WINDOW_S`` to the current decodes. Times in seconds, of any one clock."""

    def __init__(self) -> None:
        self._prompts: deque[tuple[float, int]] = deque()
        """Time, and number of prompt tokens computed."""

    def note(self, now_s: float, prompt_tokens: int) -> None:
        """Records the online prompt tokens computed since the last call."""
        self._prompts.append((now_s, prompt_tokens))
        self._forget(now_s)

    def load(self, now_s: float, streams_share: float, alone_token_s: float) -> float:
        """Returns the share of the engine's time; 1.0 is all of it.

        Args:
            streams_share: share that decodes take, as in ``OnlineRoom``.
            alone_token_s: time of a prompt token, as in ``OnlineRoom``.
        """
        self._forget(now_s)
        prompts = sum(tokens for _, tokens in self._prompts) / LOAD_WINDOW_S
        return streams_share + prompts * alone_token_s

    def _forget(self, now_s: float) -> None:
        while self._prompts and self._prompts[0][0] < now_s - LOAD_WINDOW_S:
            self._prompts.popleft()
