"""An engine process that computes nothing: every request gets one token in every step.

``neaptide serve --engine-python WRAPPER`` runs it in place of the engine; ``write_wrapper`` writes WRAPPER. So all of
the server is measured, next to an engine that takes about a microsecond for a token.
"""

import os
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path

MODULE = "neaptide.launch.serve"
STEP_MS = "SCRIPTED_STEP_MS"
"""Environment variable: time of a step in milliseconds."""
TOKEN_IDS = range(270, 370)
"""Tokens of the answers: each is a word of the embedded model."""
HEARTBEAT_S = 0.4


def write_wrapper(directory: Path) -> Path:
    """Writes an interpreter that runs this file in place of the engine's module."""
    path = directory / "scripted-engine"
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *{MODULE}*) exec "{sys.executable}" -P "{__file__}" "$@";; esac\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    path.chmod(stat.S_IRWXU)
    return path


@dataclass(slots=True)
class _Answer:
    num_prompt_tokens: int
    max_tokens: int
    num_tokens: int = 0
    scheduled_s: float = 0.0
    first_token_s: float = 0.0


def run(address: str, step_s: float) -> None:
    """Serves until ``Shutdown``."""
    import msgspec
    import zmq

    from neaptide.engine.messages import (
        AbortRequest,
        AddRequest,
        EngineReady,
        RequestOutput,
        Shutdown,
        StepOutputs,
        StepStats,
        from_engine_encoder,
        to_engine_decoder,
    )
    from neaptide.engine.params import FinishReason

    socket = zmq.Context().socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(address)
    ready = EngineReady("scripted", "cpu", "float32", 4096, 4096, 16, 100_000, [2])
    socket.send(from_engine_encoder.encode(ready))
    fields = {
        field.name: 0.0 if field.type is float else 0 for field in msgspec.structs.fields(StepStats) if field.required
    }
    answers: dict[str, _Answer] = {}
    step, due_s, sent_s = 0, time.monotonic(), 0.0
    while True:
        wait_s = (due_s if answers else time.monotonic() + HEARTBEAT_S) - time.monotonic()
        if socket.poll(max(int(wait_s * 1e3), 0)):
            message = to_engine_decoder.decode(socket.recv())
            if isinstance(message, Shutdown):
                return
            if isinstance(message, AddRequest):
                if not answers:
                    due_s = time.monotonic() + step_s
                answers[message.request_id] = _Answer(len(message.prompt_token_ids), message.params.max_tokens)
            elif isinstance(message, AbortRequest):
                for request_id in message.request_ids:
                    answers.pop(request_id, None)
        now_s = time.monotonic()
        outputs: list[RequestOutput] = []
        stats: list[StepStats] = []
        if answers and now_s >= due_s:
            for request_id, answer in answers.items():
                answer.scheduled_s = answer.scheduled_s or due_s - step_s
                answer.first_token_s = answer.first_token_s or now_s
                answer.num_tokens += 1
                outputs.append(
                    RequestOutput(
                        request_id,
                        [TOKEN_IDS[(step * 7 + answer.num_tokens) % len(TOKEN_IDS)]],
                        finish_reason=FinishReason.LENGTH if answer.num_tokens >= answer.max_tokens else None,
                        num_prompt_tokens=answer.num_prompt_tokens,
                        scheduled_s=answer.scheduled_s,
                        first_token_s=answer.first_token_s,
                    )
                )
            for output in outputs:
                if output.finish_reason is not None:
                    del answers[output.request_id]
            step += 1
            fields |= {"step": step, "now_s": now_s, "duration_s": step_s, "predicted_s": step_s}
            stats = [StepStats(**fields)]
            due_s = max(due_s + step_s, now_s)
        if outputs or now_s - sent_s > HEARTBEAT_S:
            socket.send(from_engine_encoder.encode(StepOutputs(outputs, stats)))
            sent_s = now_s


if __name__ == "__main__":
    # python -P FILE -P -m neaptide.engine.process.tied PARENT_PID neaptide.launch.serve ADDRESS CONFIG
    from neaptide.engine.process.parent import die_with_parent

    die_with_parent(int(sys.argv[-4]))
    run(sys.argv[-2], float(os.environ[STEP_MS]) / 1e3)
