"""Constructed steps and waits, with times in milliseconds that tests can add up in the head."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neaptide.engine.messages import HeldStep
from neaptide.server.why.parts import StepsAround, TokenWait

OWN, OTHER, THIRD = "own", "other", "third"
ADMISSIONS = {OTHER: 1, THIRD: 2, OWN: 3}
READMITTED = 4
"""Admission number of the request after a preemption."""


@dataclass
class Timeline:
    """Steps one after the other, from time 0."""

    now_ms: float = 0.0
    steps: list[HeldStep] = field(default_factory=list)
    taken_s: dict[str, float] = field(default_factory=dict)
    ids: dict[int, str] = field(
        default_factory=lambda: {READMITTED: OWN} | {number: name for name, number in ADMISSIONS.items()}
    )

    def idle(self, ms: float) -> None:
        self.now_ms += ms

    def step(
        self,
        ms: float,
        *,
        prompts: dict[str, int] | None = None,
        contexts: dict[str, int] | None = None,
        streams: tuple[str, ...] = (),
        batch_ms: float = 0.0,
        streams_ms: float | None = None,
        predicted_ms: float | None = None,
        admits: int = 0,
        **values: Any,
    ) -> None:
        """A step of this length, of which ``batch_ms`` are for batch work and ``streams_ms`` for streams.

        ``admits``: admission number under which it admits the request.
        """
        predicted_s = (ms if predicted_ms is None else predicted_ms) / 1e3
        online_s = predicted_s * (ms - batch_ms) / ms
        numbers = ADMISSIONS | ({OWN: admits} if admits else {})
        chunks = [(numbers[one], count, (contexts or {}).get(one, 0)) for one, count in (prompts or {}).items()]
        streams_s = (online_s if not chunks else 0.0) if streams_ms is None else streams_ms / 1e3
        end_ms = self.now_ms + ms
        self.steps.append(
            HeldStep(
                step=len(self.steps),
                start_s=self.now_ms / 1e3,
                end_s=end_ms / 1e3,
                busy_s=ms / 1e3,
                mask_s=values.pop("mask_s", 0.0),
                predicted_s=predicted_s,
                margin_s=0.0,
                online_s=online_s,
                streams_s=streams_s if streams else 0.0,
                streams=np.array([ADMISSIONS[one] for one in streams], np.int32).tobytes(),
                chunks=chunks,
                admitted=[(admits, OWN)] if admits else [],
                offline_decode_tokens=8 if batch_ms else 0,
                **{"free_slots": 8, "available_blocks": 1000, **values},
            )
        )
        self.now_ms = end_ms

    def around(self, since_ms: float = 0.0) -> StepsAround:
        return StepsAround(self.steps, self.taken_s, self.ids, block_size=16, since_s=since_ms / 1e3)

    def first_token(
        self, arrival_ms: float, target_ms: float, *, sent_ms: float = 0.0, way_back_ms: float = 0.0, **values: Any
    ) -> TokenWait:
        """The wait for a first token that the last step gave."""
        return TokenWait(
            request_id=OWN,
            start_s=arrival_ms / 1e3,
            end_s=(self.now_ms + way_back_ms) / 1e3,
            target_s=target_ms / 1e3,
            new_prompt_tokens=100,
            sent_s=max(arrival_ms, sent_ms) / 1e3,
            first_token_s=self.now_ms / 1e3,
            **values,
        )

    def gap(self, start_ms: float, target_ms: float, *, way_back_ms: float = 0.0) -> TokenWait:
        """The gap from a token at ``start_ms`` to the token of the last step."""
        return TokenWait(
            request_id=OWN,
            start_s=start_ms / 1e3,
            end_s=(self.now_ms + way_back_ms) / 1e3,
            target_s=target_ms / 1e3,
            new_prompt_tokens=100,
            sent_s=0.0,
            first_token_s=None,
        )
