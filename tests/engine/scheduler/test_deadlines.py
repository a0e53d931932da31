"""A load made so that a batch is late unless its deadline counts, beside chats that must not suffer for it."""

import math
from pathlib import Path

import msgspec

from neaptide.engine.config import CacheConfig
from neaptide.engine.messages import AddBatch
from tests.engine.baselines.costs import PerTokenCost
from tests.engine.harness import Harness, batch, flex, online

HORIZON_S, DUE_S = 18.0, 16.5
DUE_ROWS = 125
TTFT_S, TPOT_S = 1.0, 0.1
ROW_TOKENS, ANSWER_TOKENS = 40, 10


class Load:
    """Two chats a second; 125 rows that are due in 16.5 s, which alone would take half of that, beside a flood of flex
    requests and a batch without end. Steps of up to 64 tokens take up to 74 ms."""

    def __init__(self, policy: str, directory: Path, left_out: tuple[str, ...] = ()) -> None:
        self._harness = Harness(
            num_blocks=4096,
            cost_model=PerTokenCost(),
            cache=CacheConfig(block_size=16),
            policy=policy,
            left_out=left_out,
            max_num_batched_tokens=64,
        )
        self._token_s: dict[str, list[float]] = {}
        self.due_ends_s: list[float] = []
        self._arrivals_s = [k / 2 for k in range(1, int(2 * HORIZON_S))]
        self._submit(directory)
        self._run()

    def _submit(self, directory: Path) -> None:
        handle = self._harness.core.handle
        handle(self._job(directory, "endless", 700, 1e9))
        for k in range(700):
            handle(flex(f"flex{k}", [k + 1] * ROW_TOKENS, ANSWER_TOKENS))
        handle(self._job(directory, "due", DUE_ROWS, DUE_S))

    @staticmethod
    def _job(directory: Path, name: str, rows: int, deadline_s: float) -> AddBatch:
        prompts = [[len(name) * 10_000 + row] * ROW_TOKENS for row in range(rows)]
        return msgspec.structs.replace(batch(directory, name, prompts, ANSWER_TOKENS), deadline_s=deadline_s)

    def _run(self) -> None:
        core, clock = self._harness.core, self._harness.clock
        arrivals = iter([*self._arrivals_s, math.inf])
        next_s = next(arrivals)
        while clock.now() < HORIZON_S:
            while next_s <= clock.now():
                core.handle(online(f"chat{next_s}", [int(next_s * 2)] * 20, 10, arrival_s=next_s))
                self._token_s[f"chat{next_s}"] = [next_s]
                next_s = next(arrivals)
            if not core.has_work:
                clock.sleep_until(min(next_s, HORIZON_S))
            for output in core.step().outputs:
                if output.request_id.startswith("due:"):
                    self.due_ends_s.append(clock.now())
                elif output.request_id in self._token_s:
                    self._token_s[output.request_id] += [clock.now()] * len(output.new_token_ids)

    @property
    def attainment(self) -> float:
        """Of both targets, of the chats that had 5 s to end."""
        told = [times for times in self._token_s.values() if times[0] < HORIZON_S - 5.0]
        met = [times[1] - times[0] <= TTFT_S and times[-1] - times[1] <= (len(times) - 2) * TPOT_S for times in told]
        return sum(met) / len(met)

    @property
    def is_in_time(self) -> bool:
        return len(self.due_ends_s) == DUE_ROWS and self.due_ends_s[-1] <= DUE_S


def test_neaptide_meets_the_deadline_and_every_chat_its_targets(tmp_path: Path) -> None:
    """With time to spare: what is left to the last moment is late with the first burst."""
    load = Load("neaptide", tmp_path)
    assert load.is_in_time
    assert load.due_ends_s[-1] < DUE_S - 5.0
    assert load.attainment == 1.0


def test_fair_turns_alone_miss_it(tmp_path: Path) -> None:
    load = Load("neaptide", tmp_path, ("urgency",))
    assert not load.is_in_time
    assert load.attainment == 1.0


def test_best_effort_behind_priorities_misses_it(tmp_path: Path) -> None:
    load = Load("priority", tmp_path)
    assert not load.is_in_time
    assert load.attainment == 1.0
