"""Answers the tasks of the simulating subprocess. ``neaptide.launch.simulating`` starts it."""

import signal
import time
import traceback
from importlib import import_module
from typing import BinaryIO

import msgspec

from neaptide.server.counterfactual.frames import (
    ShadowAnswer,
    ShadowFigures,
    ShadowTask,
    SimulatedFigures,
    WhatIfAnswer,
    WhatIfTask,
    encoder,
    task_decoder,
)
from neaptide.server.subprocesses.child import in_bursts
from neaptide.server.subprocesses.frames import read_frame, write_frame
from neaptide.simulation.recorded.recording import TrafficRecording
from neaptide.simulation.recorded.shadow import ReplayFigures, compare

WHAT_IF_CPU_S = 60
"""Processor time limit of an answer to an operator's question."""


def answer_tasks(source: BinaryIO, sink: BinaryIO) -> None:
    """Answers tasks one by one until there are no more."""
    spent_s = 0.0
    while (frame := read_frame(source)) is not None:
        task = task_decoder.decode(frame)
        if isinstance(task, WhatIfTask):
            answer: ShadowAnswer | WhatIfAnswer = _what_if(task)
        else:
            shadow = _shadow(task)
            # The first answer includes the time of the start.
            now_s = time.process_time()
            answer, spent_s = msgspec.structs.replace(shadow, cpu_s=now_s - spent_s), now_s
        try:
            write_frame(sink, encoder.encode(answer))
        except BrokenPipeError:
            raise SystemExit("the server is gone") from None


def _what_if(task: WhatIfTask) -> WhatIfAnswer:
    # Limits processor time; the signal's default action ends this process.
    signal.setitimer(signal.ITIMER_PROF, WHAT_IF_CPU_S)
    # Imported by name, so that a server without such a question loads nothing of the cluster.
    capacity = import_module("neaptide.cluster.capacity.what_if")
    change = capacity.WhatIfChange(
        traffic=task.traffic,
        ttft_slo_s=task.ttft_slo_s,
        tpot_slo_s=task.tpot_slo_s,
        profile=task.profile,
        attainment=task.attainment,
    )
    try:
        found = capacity.what_if(TrafficRecording.decode(task.pieces), change)
    except ValueError as error:
        return WhatIfAnswer(refusal=str(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    changed, today = (
        SimulatedFigures(one.requests, one.attainment, one.offline_tokens_per_s) for one in (found.changed, found.today)
    )
    return WhatIfAnswer(found.recorded_s, changed, today, found.replicas)


def _shadow(task: ShadowTask) -> ShadowAnswer:
    try:
        recording = TrafficRecording.decode(task.pieces)
        with in_bursts():
            found = compare(recording, task.policies, task.warm_s, task.window_s, task.since_s)
    except Exception as error:
        traceback.print_tb(error.__traceback__)
        return ShadowAnswer(0.0, fault=type(error).__name__)
    if found is None:
        return ShadowAnswer(0.0)
    start_s, end_s = found.window_s
    shadows = {policy: _figures(figures) for policy, figures in found.shadows.items()}
    return ShadowAnswer(0.0, start_s, end_s, found.requests, _figures(found.real), shadows)


def _figures(figures: ReplayFigures) -> ShadowFigures:
    return ShadowFigures(figures.met, figures.offline_tokens_per_s)
