"""A fake device that takes its time, and whose text depends on what the KV blocks really hold."""

import zlib
from dataclasses import dataclass, field

from neaptide.engine.batch import ScheduledRequest, StepPlan, StepResult
from neaptide.engine.clock import Clock
from neaptide.executors.simulated.hash_executor import DeviceTime
from neaptide.executors.torch.placeholders import PLACEHOLDER

FIRST_TOKEN_ID = 6


def history_crc(crc: int, token_id: int) -> int:
    """Of a sequence, from that of the sequence without its last token."""
    return zlib.crc32(token_id.to_bytes(8, "little", signed=True), crc)


def next_token(crc: int, vocab_size: int) -> int:
    return FIRST_TOKEN_ID + crc % (vocab_size - FIRST_TOKEN_ID)


def expected_tokens(prompt: list[int], count: int, vocab_size: int) -> list[int]:
    """What a request alone answers."""
    crc, tokens = 0, []
    for token in prompt:
        crc = history_crc(crc, token)
    for _ in range(count):
        tokens.append(next_token(crc, vocab_size))
        crc = history_crc(crc, tokens[-1])
    return tokens


@dataclass
class SlowHandle:
    executor: "SlowFakeExecutor"
    end_s: float
    result: StepResult
    done: bool = False

    def wait(self) -> StepResult:
        if not self.done:
            self.done = True
            self.executor.clock.sleep_until(self.end_s)
            self.executor.in_flight -= 1
        return self.result


@dataclass
class SlowFakeExecutor:
    """Implements ``Executor``: ``submit`` returns at once, ``wait`` when the step's end has come on the clock.

    Each KV slot holds a checksum of its request's tokens up to there, and the token that a request samples comes from
    the one of its last position. A block that is handed out too early, a token that is lost or fed twice: each changes
    the text (``expected_tokens``).
    """

    clock: Clock
    step_s: float = 0.01
    num_blocks: int = 64
    block_size: int = 4
    vocab_size: int = 1000
    max_in_flight: int = 2
    in_flight: int = 0
    most_in_flight: int = 0
    device: DeviceTime = field(default_factory=DeviceTime)
    slots: dict[int, int] = field(default_factory=dict)
    sampled: dict[str, dict[int, int]] = field(default_factory=dict)
    """Of each request: its tokens by output position."""
    prompt_tokens: dict[str, int] = field(default_factory=dict)

    def submit(self, plan: StepPlan) -> SlowHandle:
        for request_id in plan.finished_ids:
            self.sampled.pop(request_id, None)
            self.prompt_tokens.pop(request_id, None)
        for new in plan.new_requests:
            self.sampled[new.request_id] = {}
            self.prompt_tokens[new.request_id] = len(new.prompt_token_ids)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        assert self.in_flight <= self.max_in_flight, "steps are submitted too far ahead"
        result = StepResult(model_s=self.step_s)
        for part in plan.scheduled:
            self._compute(part, result)
        return SlowHandle(self, self.device.add(self.clock.now(), self.step_s if plan.scheduled else 0.0), result)

    def close(self) -> None:
        self.slots.clear()

    def _compute(self, part: ScheduledRequest, result: StepResult) -> None:
        sampled, start = self.sampled[part.request_id], part.num_computed_tokens
        crc = self.slots[self._slot(part, start - 1)] if start else 0
        for position, given in enumerate(part.token_ids, start):
            output_position = position - self.prompt_tokens[part.request_id]
            token = sampled[output_position] if given == PLACEHOLDER else given
            assert sampled.get(output_position, token) == token, "another token than the one that was sampled"
            crc = history_crc(crc, token)
            self.slots[self._slot(part, position)] = crc
        if part.sample:
            token = next_token(crc, self.vocab_size)
            sampled[part.output_position] = result.token_ids[part.request_id] = token

    def _slot(self, part: ScheduledRequest, position: int) -> int:
        return part.block_ids[position // self.block_size] * self.block_size + position % self.block_size
