"""Random histories over vLLM's runner: integrity after every step, every text right, and nothing left behind."""

import os
import random
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from neaptide.engine.messages import AbortRequest, RequestOutput, SetOffline
from neaptide.engine.params import INTERNAL_ERROR, INVALID_TOKEN, FinishReason, SamplingParams, Tier
from neaptide.engine.steps.plan import StepPlan
from neaptide.executors.contract import StartedExecutor
from tests.engine.histories import History
from tests.executors.engine_run import EOS_TOKEN_ID
from tests.executors.grammars.cases import SCHEMAS, of_schema
from tests.executors.vllm.inside import worker_side
from tests.executors.vllm.inside.families import VOCAB
from tests.executors.vllm.inside.faults import PLACES, Raises, in_workers, known_to_the_runner, num_failed_steps, vllm
from tests.executors.vllm.inside.runs import GAP, Run, prompts

Checkpoint = tuple[Path, PreTrainedModel]
NUM_STEPS = int(os.environ.get("NEAPTIDE_TEST_BLAST_STEPS", "300"))
NUM_DISCONNECTS = int(os.environ.get("NEAPTIDE_TEST_DISCONNECTS", "300"))
MOST_HELD = 40
FEW_BLOCKS = 12
PROMPT_SCALE = 4
"""For blocks of 32 tokens: prompts of up to half of those few blocks."""
FAULT_EVERY_STEPS = 30
MOST_GROWTH_BYTES = 64 << 20
"""Of a worker's process while the second half of the clients come and go; what is measured exactly is beside this."""


class GreedyHistory(History):
    """A few draw, and a few ask for what is no token; all others are greedy."""

    def _params(self) -> SamplingParams:
        params = super()._params()
        if self._random.random() < 0.1:
            return msgspec.structs.replace(params, seed=self._random.randrange(100))
        return msgspec.structs.replace(params, temperature=0.0)

    def _prompt(self) -> list[int]:
        prompt = super()._prompt()
        if self._random.random() < 0.02:
            prompt[self._random.randrange(len(prompt))] = VOCAB
        return prompt


class Ends(dict[str, RequestOutput]):
    """By request, each once."""

    def __setitem__(self, request_id: str, output: RequestOutput) -> None:
        assert request_id not in self, "it ends twice"
        super().__setitem__(request_id, output)


class BlastRun(Run):
    """With room for batch rows, whose ids nobody has told it, and a note of what was asked."""

    def __init__(self, started: StartedExecutor, depth: int) -> None:
        super().__init__(started.executor, FEW_BLOCKS, overlap_depth=depth, max_num_seqs=6, max_num_batched_tokens=96)
        self.tokens = defaultdict(list)
        self.ends = Ends()
        self.asked: dict[str, SamplingParams] = {}
        self.device.before = self._note

    def _note(self, plan: StepPlan) -> None:
        self.asked |= {new.request_id: new.params for new in plan.new_requests}

    @property
    def num_held(self) -> int:
        """Requests and rows that have not ended."""
        queues = self.core.scheduler.queues
        return sum(map(len, (queues.waiting_online, queues.running_online, queues.running_offline, queues.pool)))


def sometimes(seed: int) -> Any:
    """Where a step raises, if it does; never while one that raised is taken apart."""
    rng = random.Random(seed)
    quiet = FAULT_EVERY_STEPS

    def where(request_ids: Collection[str]) -> str | None:
        nonlocal quiet
        quiet -= 1
        if quiet > 0 or len(request_ids) < 2:
            return None
        quiet = rng.randrange(20, 2 * FAULT_EVERY_STEPS)
        return rng.choice(PLACES)

    return where


@torch.no_grad()
def compared(model: PreTrainedModel, prompt: list[int], run: BlastRun, request_id: str) -> int:
    """How many tokens of a greedy answer are those of ``transformers``, its end included, up to a close call."""
    params, end = run.asked[request_id], run.ends[request_id]
    said = list(run.tokens[request_id])
    if end.finish_reason is FinishReason.STOP:
        assert end.stop_token_id is not None
        said.append(end.stop_token_id)
    elif end.finish_reason is FinishReason.LENGTH:
        assert len(said) == params.max_tokens
    if not said:
        return 0
    logits = model(torch.tensor([[*prompt, *said]])).logits[0, len(prompt) - 1 : -1]
    ends = [*params.stop_token_ids, *(() if params.ignore_eos else (EOS_TOKEN_ID,))]
    logits[: params.min_tokens, ends] = -torch.inf
    values, ids = logits.topk(2)
    close = (values[:, 0] - values[:, 1] < GAP).nonzero()
    count = int(close[0]) if len(close) else len(said)
    assert said[:count] == ids[:count, 0].tolist()
    assert not set(said[params.min_tokens : -1]) & set(ends)
    return count


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("depth", [0, 1])
def test_random_histories(
    checkpoint: Checkpoint,
    started: StartedExecutor,
    depth: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, history = BlastRun(started, depth), GreedyHistory(depth, tmp_path, scale=PROMPT_SCALE)
    raises = Raises(vllm(started)._workers, sometimes(depth), monkeypatch)
    for _ in range(NUM_STEPS):
        if run.num_held < MOST_HELD:
            history.turn(run)
        else:
            run.core.handle(SetOffline(False))
        run.step()
    run.core.handle(SetOffline(False))
    run.finish()
    assert num_failed_steps(caplog) == raises.num_raised, "steps fail that nobody poisoned"
    assert raises.num_raised >= NUM_STEPS // (4 * FAULT_EVERY_STEPS)
    assert sum(end.num_preemptions for end in run.ends.values()) > NUM_STEPS // 100
    # Rows of a cancelled batch that never started are forgotten without a word; everything else ends.
    forgotten = set(history.prompts) - set(run.ends)
    assert all(":" in row and history.is_cut_short(row) and row not in run.asked for row in forgotten)
    assert not any(end.error == INTERNAL_ERROR for end in run.ends.values())
    assert_nothing_is_held(run)
    assert_right(checkpoint[1], history, run)


def assert_right(model: PreTrainedModel, history: History, run: BlastRun) -> None:
    num_compared = 0
    for request_id, end in run.ends.items():
        prompt = history.prompts[request_id]
        if VOCAB in prompt:
            assert end.error == INVALID_TOKEN or history.is_cut_short(request_id) or request_id not in run.asked
        else:
            assert end.error is None
            if request_id in run.asked and run.asked[request_id].temperature == 0.0:
                num_compared += compared(model, prompt, run, request_id)
    assert num_compared > NUM_STEPS


def assert_nothing_is_held(run: Run) -> None:
    pool = run.core.kv.occupancy()
    assert pool.online + pool.offline == 0
    assert pool.free + pool.cached == run.core.kv.num_blocks


def tell_what_ended(started: StartedExecutor, run: Run) -> None:
    """What the next step would say first, without one."""
    executor = vllm(started)
    plan = StepPlan.of_parts(0, [], finished_ids=list(executor.translator.told))
    executor.submit(plan).wait()
    executor._workers.execute_model(executor.translator.order(plan))


def settled(started: StartedExecutor, run: Run, name: str) -> list[dict[str, int]]:
    """What the executor and each rank's runner keep when the last thing that they did is the same small request: the
    lengths of containers and the bytes of arrays, those of requests with grammars included."""
    run.add(name, [7, 8, 9], max_tokens=2)
    run.finish()
    tell_what_ended(started, run)
    return [worker_side.measure(vllm(started), "executor", "neaptide."), *in_workers(started, worker_side.sizes)]


def differing(before: list[dict[str, int]], after: list[dict[str, int]]) -> list[str]:
    return [
        f"{name}: {old.get(name)}, then {new.get(name)}"
        for old, new in zip(before, after, strict=True)
        for name in sorted(set(old) | set(new))
        if old.get(name) != new.get(name)
    ]


WISHES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "seed": 3},
    {"logit_bias": {7: 1.0}, "min_tokens": 2, "ignore_eos": False},
    {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"logprobs": 2, "prompt_logprobs": 1},
]
if not os.environ.get("TRITON_INTERPRET"):  # which does not run the kernels for these
    WISHES += [{"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01}, {"grammar": of_schema(SCHEMAS[0])}]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("depth", [0, 1])
def test_clients_that_leave_leave_nothing(started: StartedExecutor, depth: int) -> None:
    rng = random.Random(depth)
    run = BlastRun(started, depth)
    for i, wish in enumerate(WISHES):  # what is made once, for the first who wants it
        run.add(f"wish{i}", [7, 8, 9], **{"max_tokens": 4} | wish)
    run.finish()
    before = settled(started, run, "first")
    resident: list[int] = []
    asked = prompts(NUM_DISCONNECTS, seed=20 + depth)
    alive: list[str] = []
    for i, prompt in enumerate(asked):
        tier = rng.choice([Tier.DEFAULT, Tier.FLEX])
        run.add(f"x{i}", prompt, tier, **{"max_tokens": 40} | rng.choice(WISHES))
        alive.append(f"x{i}")
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            run.step()
        while len(alive) > 8:
            run.core.handle(AbortRequest([alive.pop(rng.randrange(len(alive)))]))
        if i == NUM_DISCONNECTS // 2:
            resident = in_workers(started, worker_side.resident_bytes)
    run.core.handle(AbortRequest(alive))
    run.finish()
    assert len(run.ends) == NUM_DISCONNECTS + len(WISHES) + 1
    assert_nothing_is_held(run)
    assert differing(before, settled(started, run, "last")) == []
    assert known_to_the_runner(started) == set()
    assert vllm(started).translator.told == {}
    assert not vllm(started).grammars.request_ids
    for old, new in zip(resident, in_workers(started, worker_side.resident_bytes), strict=True):
        assert new - old < MOST_GROWTH_BYTES
