"""When the engine process says what."""

from collections.abc import Sequence

from neaptide.engine.messages import EngineReady, FromEngine, Shutdown, StepOutputs, ToEngine
from neaptide.engine.observer import EngineObserver
from neaptide.engine.process.loop import run_engine
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.steps.plan import StepResult
from neaptide.engine.steps.step import Step
from tests.engine.harness import Harness, online

READY = EngineReady("", "", "", 0, 0, 0, 0, [])


class Listener(EngineObserver):
    """Source and sink of the engine's loop, and its observer: hands out messages whenever the engine is idle, then the
    end; notes each message as its tokens and the steps that it has statistics of, and when a step has been noted."""

    def __init__(self, harness: Harness, *messages: ToEngine) -> None:
        self._harness = harness
        self._messages = list(messages)
        self.log: list[str] = []

    def poll(self, timeout_s: float) -> Sequence[ToEngine]:
        self._harness.clock.sleep_until(self._harness.clock.now() + timeout_s)
        if self._harness.core.has_work:
            return []
        messages, self._messages = self._messages, []
        return messages or [Shutdown()]

    def send(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs) and (message.outputs or message.stats):
            tokens = sum(len(output.new_token_ids) for output in message.outputs)
            self.log.append(f"{tokens} tokens, steps {[stats.step for stats in message.stats]}")

    def committed(self, step: Step, result: StepResult, scheduler: Scheduler) -> None:
        self.log.append(f"step {step.plan.step} noted")


def served(harness: Harness, *messages: ToEngine) -> list[str]:
    listener = Listener(harness, *messages)
    harness.core.subscribe(listener)
    run_engine(harness.core, READY, listener, listener, harness.clock)
    return listener.log


def test_tokens_are_sent_before_their_step_is_noted_and_what_it_took_with_the_next() -> None:
    assert served(Harness(), online("a", [7] * 8, max_tokens=3)) == [
        "1 tokens, steps []",
        "step 1 noted",
        "1 tokens, steps [1]",
        "step 2 noted",
        "step 3 noted",
        "1 tokens, steps [2, 3]",  # the end, and with it all that was counted
    ]


def test_a_step_in_flight_is_told_of_likewise() -> None:
    log = served(Harness(overlap_depth=1), online("a", [7] * 8, max_tokens=2))
    assert log == ["1 tokens, steps []", "step 1 noted", "step 2 noted", "1 tokens, steps [1, 2]"]
