"""W5 of ``benchmarks.same_kernels``, without servers."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import same_kernels
from benchmarks.live import late
from benchmarks.live.late import SeenRun
from benchmarks.live.plan import Plan, Window
from benchmarks.vllm_server import PRIORITY_RIVALS, Machine
from neaptide.loadgen.client.recorder import ChatRecord

MACHINE = Machine(Path("python"), 2, "bfloat16", 128, 4.0, True, "cpu", 1024)


def chat(at_s: float, ttft_s: float, tpot_s: float) -> ChatRecord:
    first_s = at_s + ttft_s
    return ChatRecord(
        at_s,
        arrival_s=at_s,
        token_times_s=[first_s, first_s + 31 * tpot_s],
        num_output_tokens=32,
        finish_reason="length",
    )


@pytest.mark.parametrize("keeps", [True, False])
def test_step_logs_of_our_two_runs_are_kept_beside_what_the_clients_saw(
    keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Online alone takes 25 ms a token: targets are 300 and 60 ms. Beside the batch one of two chats is late."""
    asked: list[tuple[bool, Path | None]] = []

    async def run(plan: Plan, flags: list[str], *, online: bool, offline: bool, step_log: Path | None = None) -> Window:
        asked.append((offline, step_log))
        pace_s = 0.065 if offline else 0.025
        return Window(1.0, records=[chat(1.0, 0.1, 0.025), chat(2.0, 0.2, pace_s)])

    async def run_rival(*args: Any, **kwargs: Any) -> Window:
        return Window(1.0, records=[chat(1.0, 0.1, 0.03), chat(2.0, 0.2, 0.03)])

    monkeypatch.setattr(same_kernels, "run", run)
    monkeypatch.setattr(late, "run", run)
    monkeypatch.setattr(same_kernels, "run_rival", run_rival)
    plan = Plan(60.0, (6.0, 57.0), tmp_path, seed=3)
    kept_in = tmp_path if keeps else None
    found = asyncio.run(same_kernels.measure_load(plan, MACHINE, PRIORITY_RIVALS[:1], 0.4, 1000.0, kept_in))
    assert found["targets_ms"] == {"ttft": 300.0, "tpot": 60.0}
    assert found["bars"]["attainment_minus_alone"] == -0.5
    logs = [tmp_path / f"load-0.4-seed-3-{name}.steps.jsonl" if keeps else None for name in ("alone", "beside")]
    assert asked == [(False, None), (False, logs[0]), (True, logs[1])]
    assert sorted(path.name for path in tmp_path.iterdir()) == (
        ["load-0.4-seed-3-alone.chats.json", "load-0.4-seed-3-beside.chats.json"] if keeps else []
    )
    if keeps:
        seen = msgspec.json.decode((tmp_path / "load-0.4-seed-3-beside.chats.json").read_bytes(), type=SeenRun)
        assert [seen.ttft_slo_s, seen.tpot_slo_s] == pytest.approx([0.3, 0.06])
        assert [chat.is_in_time for chat in seen.chats] == [True, False]
