"""How much slack running streams keep in hand after every step: as much as they have lost in a stall of late."""

import math
from collections import deque

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray

LEAST_SHARE = 1.0
"""Of its TPOT target, the slack that a stream keeps after every step: one step that overruns, its last one above all,
must not make it late."""
MOST_SHARE = 6.0
"""Where prompts come in bursts that stall the streams for longer. Beyond it, streams of usual length end before they
have gained it."""
LEAST_TOKENS_TO_GAIN = 10
"""From its first token on, because to make all streams short of it wait for nothing but each other wastes whole steps.
Streams share their steps, and among many there is always one that has just begun: what it gains with a token, every
step is shorter by, whatever the others have in hand ..."""
GAINED_AFTER = 3
"""... so it takes longer where answers are longer: one of so many parts of the median answer ..."""
RECENT_ANSWERS = 100
"""... of the last ones."""
MOST_GAIN = 0.4
"""No token gains more than this share of the TPOT target."""
HALF_LIFE_S = 60.0
"""Of what is remembered of the deepest dip."""


class Cushion:
    """In shares of a stream's TPOT target.

    Offline work spends what streams have beyond their cushion, so a stall by online prompts makes every stream late by
    what it takes beyond it. The dips that are measured do not depend on the cushion: they are counted from it down.
    """

    def __init__(self) -> None:
        self._dip = 0.0
        self._seen_s = 0.0
        self._answers: deque[int] = deque(maxlen=RECENT_ANSWERS)
        self._tokens_to_gain = LEAST_TOKENS_TO_GAIN

    def observe_answer(self, num_tokens: int) -> None:
        """A stream has ended with so many tokens."""
        self._answers.append(num_tokens)
        median = sorted(self._answers)[len(self._answers) // 2]
        self._tokens_to_gain = max(median // GAINED_AFTER, LEAST_TOKENS_TO_GAIN)

    def in_hand(self, num_output: IntArray, share: float) -> FloatArray:
        """Of streams with so many tokens, in TPOT targets, if those that have gained it have so many."""
        gain = min(share / self._tokens_to_gain, MOST_GAIN)
        in_targets: FloatArray = np.minimum(gain * num_output, share)
        return in_targets

    def observe(self, now_s: float, dip: float) -> None:
        """The deepest of the running streams is so far below its cushion, or will be after the shortest step."""
        dip = min(dip, MOST_SHARE)
        if dip >= self._left(now_s):
            self._dip, self._seen_s = dip, now_s

    def share(self, now_s: float) -> float:
        return max(LEAST_SHARE, self._left(now_s))

    def _left(self, now_s: float) -> float:
        return self._dip * math.pow(0.5, (now_s - self._seen_s) / HALF_LIFE_S)
