"""Writes every request of a run as a line of JSON, for further statistics."""

import json
from collections.abc import Mapping

from neaptide.loadgen.client.recorder import ChatRecord
from neaptide.loadgen.run.load import Shot
from neaptide.loadgen.run.runner import Progress


def record_lines(runs: Mapping[str, Progress]) -> str:
    """Lines by server, in the order of arrival, without any text."""
    return "".join(
        json.dumps({"server": name} | _fields(shot, record)) + "\n"
        for name, progress in runs.items()
        for shot, record in sorted(progress.records, key=lambda pair: pair[1].arrival_s)
    )


def _fields(shot: Shot, record: ChatRecord) -> dict[str, float | int | str | bool | None]:
    return {
        "arrival_s": round(record.arrival_s, 6),
        "late_ms": _ms(record.late_s),
        "ttft_ms": _ms(record.ttft_s),
        "ttft_from_sending_ms": _ms(record.ttft_from_sending_s),
        "tpot_ms": _ms(record.tpot_s),
        "e2e_ms": _ms(record.e2e_s),
        "prompt_tokens": record.num_prompt_tokens,
        "output_tokens": record.num_output_tokens,
        "target_ms": str(shot.target),
        "cancelled": record.cancelled,
        "error": record.error,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
