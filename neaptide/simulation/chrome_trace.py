"""Converts a step log for chrome://tracing and https://ui.perfetto.dev (the JSON trace event format).

The engine's steps and counters are one process row; each request class is another. A request's bar lasts from getting
its blocks to releasing them. Bars use the lowest free lane.
"""

import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from neaptide.engine.params import FinishReason
from neaptide.engine.record.step_log import HeaderLine, StepLine, read_log
from neaptide.simulation.logged_requests import LoggedRequests

Event = dict[str, Any]
ENGINE, ONLINE, OFFLINE = 1, 2, 3
"""Process ids: rows of the viewer."""


def write_chrome_trace(log: Path, out: Path) -> None:
    """Converts a step log.

    Raises:
        ValueError: ``log`` is not a step log.
        OSError: a file cannot be read or written.
    """
    with open(out, "w", encoding="utf-8") as target:
        target.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for event in chrome_events(log):
            target.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
        target.write("\n]}\n")


def chrome_events(log: Path) -> Iterator[Event]:
    """The events of a trace, in the order of their ends; times in microseconds."""
    for process, name in ((ENGINE, "engine"), (ONLINE, "online requests"), (OFFLINE, "offline requests")):
        yield {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}
    requests, bars, num_blocks, end_s = LoggedRequests(), _Bars(), 0, 0.0
    for line in read_log(log):
        requests.take(line)
        if isinstance(line, HeaderLine):
            num_blocks = line.num_blocks
        elif isinstance(line, StepLine):
            end_s = line.t[-1]
            yield from bars.take(line, requests)
            yield from _step_events(line, bars.num_decoding, num_blocks)
    yield from bars.close(end_s)


def _step_events(line: StepLine, num_decoding: int, num_blocks: int) -> Iterator[Event]:
    start_s, end_s = line.t[0], line.t[-1]
    cached, online, offline = line.kv
    predicted_s, margin_s, budget_s = line.predicted
    prompt_tokens = sum(tokens for _, tokens in line.chunks)
    yield {
        "name": f"step {line.step}{', aborted' if line.given_up else ''}",
        "ph": "X",
        "pid": ENGINE,
        "tid": 0,
        "ts": 1e6 * start_s,
        "dur": 1e6 * (end_s - start_s),
        "args": {
            "one token": num_decoding,
            "prompts": len(line.chunks),
            "prompt tokens": prompt_tokens,
            "predicted ms": 1e3 * predicted_s,
            "margin ms": 1e3 * margin_s,
            "budget ms": 1e3 * budget_s,
            "preempted": len(line.preempt),
        },
    }
    tokens = {"decode": num_decoding, "prompt": prompt_tokens}
    blocks = {"online": online, "offline": offline, "cached": cached, "free": num_blocks - cached - online - offline}
    yield {"name": "tokens of the step", "ph": "C", "pid": ENGINE, "ts": 1e6 * start_s, "args": tokens}
    yield {"name": "KV blocks", "ph": "C", "pid": ENGINE, "ts": 1e6 * end_s, "args": blocks}


class _Bars:
    """The requests that hold blocks, each in a lane of its class."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Event, int]] = {}
        """Handle -> the bar and its lane."""
        self._free: dict[int, list[int]] = {ONLINE: [], OFFLINE: []}
        """Lanes that are free again, as heaps."""
        self._num_slots = {ONLINE: 0, OFFLINE: 0}
        self._decoding: set[int] = set()
        self.num_decoding = 0
        """Requests that computed one token in the last step."""

    def take(self, line: StepLine, requests: LoggedRequests) -> Iterator[Event]:
        """The bars that end with a step."""
        start_s, end_s = line.t[0], line.t[-1]
        self._decoding = (self._decoding - set(line.leave)) | set(line.join)
        self.num_decoding = len(self._decoding)
        for handle in line.preempt:
            yield from self._end(handle, start_s, {"end": "preempted"})
        for handle, cached_tokens in line.admit:
            request = requests[handle]
            process = ONLINE if request.is_online else OFFLINE
            slot = heapq.heappop(self._free[process]) if self._free[process] else self._new_slot(process)
            args = {"prompt tokens": request.prompt_tokens, "cached tokens": cached_tokens}
            bar = {"name": request.request_id, "ph": "X", "pid": process, "tid": slot, "ts": 1e6 * start_s}
            self._open[handle] = bar | {"args": args}, slot
        for handle, output_tokens, reason, _ in line.end:
            self._decoding.discard(handle)
            yield from self._end(handle, end_s, {"output tokens": output_tokens, "end": FinishReason(reason).name})

    def close(self, end_s: float) -> Iterator[Event]:
        """The bars that are open at the end of the log."""
        for handle in list(self._open):
            yield from self._end(handle, end_s, {"end": "end of the log"})

    def _end(self, handle: int, t_s: float, args: dict[str, Any]) -> Iterator[Event]:
        if handle in self._open:  # skips requests that ended while waiting
            bar, slot = self._open.pop(handle)
            heapq.heappush(self._free[bar["pid"]], slot)
            yield bar | {"dur": 1e6 * t_s - bar["ts"], "args": bar["args"] | args}

    def _new_slot(self, process: int) -> int:
        self._num_slots[process] += 1
        return self._num_slots[process] - 1
