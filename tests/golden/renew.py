"""Writes the golden step log anew: ``python -m tests.golden.renew``. For changes of decisions that are meant."""

from pathlib import Path

from neaptide.simulation.simulator import Run, simulate
from tests.simulation.scenes import mixed

GOLDEN_LOG = Path(__file__).with_name("mixed_neaptide.jsonl")


def write_log(path: Path) -> Run:
    return simulate(mixed(), step_log=path)


if __name__ == "__main__":
    print(write_log(GOLDEN_LOG).result.to_json().decode())
