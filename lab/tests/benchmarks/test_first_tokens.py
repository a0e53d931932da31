"""The parts of a first token add up to what the client saw."""

import pytest

from lab.benchmarks.first_tokens import PARTS, PHASES, parts_of
from neaptide.loadgen.client.prometheus import Samples


def metrics(steps: int, ttft_s: float, **phases_s: float) -> Samples:
    lines = [f'neaptide_step_seconds_count{{phase="total"}} {steps}', f"neaptide_request_ttft_seconds_sum {ttft_s}"]
    total_s = sum(phases_s.get(phase, 0.0) for phase in ("prepare", "model", "sample"))
    seconds = phases_s | {"total": total_s}
    lines += [f'neaptide_step_seconds_sum{{phase="{phase}"}} {value}' for phase, value in seconds.items()]
    return Samples("\n".join(lines) + "\n")


BEFORE = metrics(3, 1.0, **dict.fromkeys(PHASES, 0.5))


def test_the_parts_add_up() -> None:
    after = metrics(4, 1.08, schedule=0.501, prepare=0.502, model=0.55, sample=0.503, commit=0.504)
    found = parts_of(0.09, BEFORE, after)
    assert sum(found[part] for part in PARTS) == pytest.approx(found["ttft"])
    assert found["step"] == pytest.approx(0.055)
    assert found["client and sockets"] == pytest.approx(0.01)
    assert found["API process and queue"] == pytest.approx(0.02)


def test_a_chat_with_two_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="2 steps"):
        parts_of(0.09, BEFORE, metrics(5, 1.08, **dict.fromkeys(PHASES, 0.6)))
