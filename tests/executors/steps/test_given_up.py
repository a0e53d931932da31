"""Steps that are given up between layers: in C, where all layers are one call, and layer by layer."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from neaptide.engine.clock import MonotonicClock
from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig
from neaptide.engine.params import SamplingParams
from neaptide.engine.process.arrivals import OnlineArrivals, create_arrivals
from neaptide.engine.steps.plan import NewRequest, StepPlan, StepResult
from neaptide.executors.torch.models.base import GivingUp, StepAborted
from neaptide.executors.torch.models.decoder import Decoder
from neaptide.executors.torch.start import start
from neaptide.executors.torch.torch_executor import TorchExecutor
from neaptide.kernels.native import COMPILERS
from tests.engine.harness import online
from tests.executors.driver import EVERY_LOGPROB, Driver, Track, make_executor, write_checkpoint, write_family

KERNELS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C compiler")),
]
CHAT = online("chat", [7])
PENALTIES = SamplingParams(temperature=0.7, seed=5, presence_penalty=0.8, logprobs=3, logit_bias={9: 1.5})


@pytest.fixture
def arrivals() -> Iterator[OnlineArrivals]:
    fd = create_arrivals()
    yield OnlineArrivals(fd)
    os.close(fd)


class Interrupted:
    """Implements ``Executor``: before every second step somebody comes, and it is given up and submitted again, with
    the requests that it was to make known."""

    def __init__(self, executor: TorchExecutor, arrivals: OnlineArrivals, share: float = 1.0) -> None:
        self._executor, self._arrivals, self._share = executor, arrivals, share
        self.given_up: list[StepResult] = []

    @property
    def num_blocks(self) -> int:
        return self._executor.num_blocks

    def submit(self, plan: StepPlan) -> object:
        if plan.step % 2:
            plan.abortable_share = self._share
            self._arrivals.note_sent(CHAT)
            self.given_up.append(self._executor.submit(plan).wait())
            self._arrivals.note_taken(CHAT)
        plan.abortable_share = 1.0  # nobody comes
        return self._executor.submit(plan)

    def close(self) -> None:
        self._executor.close()


def answers(executor: object) -> list[Track]:
    """Of four requests that come one after the other, whole prompts and in chunks."""
    driver = Driver(executor)  # type: ignore[arg-type]
    tracks: list[Track] = []
    for number, (length, params) in enumerate(
        ((5, EVERY_LOGPROB), (40, PENALTIES), (3, PENALTIES), (30, EVERY_LOGPROB))
    ):
        tracks.append(driver.add(f"r{number}", [3 + (7 * number + 11 * i) % 120 for i in range(length)], params))
        driver.run(4 * number + 3, chunk=9)
    return tracks


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_is_given_up_is_computed_again_with_the_same_bits(
    kernels: str, tmp_path: Path, arrivals: OnlineArrivals
) -> None:
    write_checkpoint(tmp_path)
    expected = answers(make_executor(tmp_path, cpu_kernels=kernels))
    interrupted = Interrupted(make_executor(tmp_path, cpu_kernels=kernels, arrivals=arrivals), arrivals)
    found = answers(interrupted)
    assert len(interrupted.given_up) > 10
    assert all(result.is_aborted and not result.errors and not result.logprobs for result in interrupted.given_up)
    assert [track.output for track in found] == [track.output for track in expected]
    assert [track.logprobs for track in found] == [track.logprobs for track in expected]
    assert [track.prompt_logprobs for track in found] == [track.prompt_logprobs for track in expected]


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_step_that_may_not_be_given_up_is_computed_to_its_end(
    kernels: str, tmp_path: Path, arrivals: OnlineArrivals
) -> None:
    write_checkpoint(tmp_path)
    interrupted = Interrupted(make_executor(tmp_path, cpu_kernels=kernels, arrivals=arrivals), arrivals, share=0.0)
    answers(interrupted)
    assert not any(result.is_aborted for result in interrupted.given_up)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_step_in_pieces_is_given_up_whole(kernels: str, tmp_path: Path, arrivals: OnlineArrivals) -> None:
    """Memory has run out before, so that at most 4 tokens are computed at once."""
    write_checkpoint(tmp_path)
    executor = make_executor(tmp_path, cpu_kernels=kernels, arrivals=arrivals)
    executor._limit.begin_step(40)
    executor._limit.lower(8)
    interrupted = Interrupted(executor, arrivals)
    found = answers(interrupted)
    assert all(result.is_aborted for result in interrupted.given_up)
    assert [track.output for track in found] == [
        track.output for track in answers(make_executor(tmp_path, cpu_kernels=kernels))
    ]


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_who_comes_in_the_middle_is_seen_before_the_next_layer(
    family: str, tmp_path: Path, arrivals: OnlineArrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer by layer; of four layers a step is given up for who comes in the first three."""
    write_family(family, tmp_path, num_hidden_layers=4)
    executor = make_executor(tmp_path, cpu_kernels="torch", arrivals=arrivals)
    layers = executor._runner.model.layers  # type: ignore[attr-defined]
    for number, is_aborted in enumerate((True, True, False, False)):
        layer, seen = layers[number], []

        def computed(*args: object, layer: object = layer, seen: list[bool] = seen) -> None:
            type(layer).forward_(layer, *args)  # type: ignore[attr-defined]
            if not seen:
                arrivals.note_sent(CHAT)
            seen.append(True)

        monkeypatch.setattr(layer, "forward_", computed)
        driver = Driver(executor)
        driver.add(f"r{number}", [5, 6, 7])
        part = driver._schedule(f"r{number}", 3)
        plan = StepPlan.of_parts(number, [part], [NewRequest(f"r{number}", [5, 6, 7], SamplingParams())])
        plan.abortable_share = 0.75
        assert executor.submit(plan).wait().is_aborted == is_aborted
        assert seen
        arrivals.note_taken(CHAT)


def test_a_family_that_cannot_stop_computes_to_the_end(
    tmp_path: Path, arrivals: OnlineArrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was plugged in, whose ``forward`` has no such argument."""
    write_checkpoint(tmp_path)
    expected = answers(make_executor(tmp_path, cpu_kernels="torch"))
    monkeypatch.setattr(Decoder, "forward", lambda self, *four, whole=Decoder.forward: whole(self, *four))
    interrupted = Interrupted(make_executor(tmp_path, cpu_kernels="torch", arrivals=arrivals), arrivals)
    assert [track.output for track in answers(interrupted)] == [track.output for track in expected]
    assert not any(result.is_aborted for result in interrupted.given_up)


def test_the_share_is_of_layers(arrivals: OnlineArrivals) -> None:
    arrivals.note_sent(CHAT)
    half = GivingUp(arrivals, 0.5)
    for layer in (0, 1):
        with pytest.raises(StepAborted):
            half.check(layer, 4)
    half.check(2, 4)


def test_it_says_whether_it_looks_who_comes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    fd = create_arrivals()
    config = EngineConfig(
        executor=ExecutorConfig(model_path=str(tmp_path), device="cpu", dtype="float32", num_threads=1),
        cache=CacheConfig(num_blocks=8),
    )
    assert not start(config, MonotonicClock()).capabilities.abortable_steps
    with_arrivals = EngineConfig(executor=config.executor, cache=config.cache, arrivals_fd=fd)
    assert start(with_arrivals, MonotonicClock()).capabilities.abortable_steps
    os.close(fd)
