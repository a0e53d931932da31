"""The stage of the GPU run that tries and times the kernels, and their tuning, dry."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import kernels, main, overlap, tune_attention
from neaptide.kernels.prefix_attention.tiles import load_tiles


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.mark.full
def test_dry_run_of_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of the executor on them, against the dense model."""
    monkeypatch.setenv("OUT", str(tmp_path))
    assert main.main(["--dry", "--stages", "kernels"]) == 0
    found = read(tmp_path / "kernels.json")
    assert (found["status"], found["ok"]) == ("done", True)
    assert [row["step"] for row in found["steps"]] == [step.name for step in kernels.DRY_STEPS]
    assert all(row[name] > 0 for row in found["steps"] for name in ("kernel_s", "unshared_s", "torch_s", "kv_gb_per_s"))
    (case,) = found["executor"]
    assert (case["dtype"], case["scenario"], case["ok"]) == ("float32", "mixed", True)
    assert case["tokens_compared"] > 0


def test_wrong_kernels_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(kernels, "DRY_STEPS", kernels.DRY_STEPS[:1])
    monkeypatch.setattr(kernels, "TOLERANCE", 0.0)
    monkeypatch.setattr(main, "check_correctness", lambda *args, **options: {"ok": True, "cases": []})
    assert main.main(["--dry", "--stages", "kernels"]) == 1
    assert read(tmp_path / "kernels.json")["reason"] == "the kernels' results differ from torch's"


@pytest.mark.full
def test_dry_run_of_the_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert main.main(["--dry", "--stages", "overlap"]) == 0
    (row,) = read(tmp_path / "overlap.json")["steps"]
    assert [(way["split"], way["processors"]) for way in row["splits"]] == [
        ("decodes, prompts", 1.0),
        ("half of each", 1.0),
    ]
    for way in row["splits"]:
        assert way["gain"] == pytest.approx(row["whole_s"] / way["seconds"] - 1)
        assert way["difference"] <= overlap.TOLERANCE
    (both,) = row["at_once"]
    longer, shorter = sorted((row["products_s"], row["attention_s"]), reverse=True)
    assert row["kappa"] == pytest.approx((both["seconds"] - longer) / shorter)


def test_halves_that_compute_something_else_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "DRY_STEPS", (overlap._step(2, 4, (3, 2)),))
    compute = overlap._Case.compute_layers

    def other(case: overlap._Case, parts: Sequence[overlap.Part]) -> list[Tensor]:
        return [hidden + len(parts) - 1 for hidden in compute(case, parts)]

    monkeypatch.setattr(overlap._Case, "compute_layers", other)
    with pytest.raises(RuntimeError, match="decodes, prompts of 2 decodes at 4 and 5 tokens of prompts are off by"):
        overlap.measure_overlap(torch.device("cpu"), dry=True, progress=lambda line: None)


def test_bytes_are_counted_once() -> None:
    """Two requests of 70 and 66 tokens, of which 64 are in the same blocks."""
    step = kernels.Step("", (1, 2), (69, 64), groups=1, shared_tokens=64)
    assert step.kv_tokens(step.tables()[0]) == 64 + 6 + 2


def test_dry_tuning_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of what was there for these heads on this device, beside all others."""
    monkeypatch.setattr(tune_attention, "DRY_STEPS", kernels.DRY_STEPS[:1])
    out = tmp_path / "tiles.json"
    assert tune_attention.main(["--dry", "--heads", "4", "--kv-heads", "1", "--head-dim", "32", "--out", str(out)]) == 0
    *others, found = load_tiles(out)
    assert others == load_tiles()
    assert (found.head_dim, found.group, found.device, found.element_bytes) == (32, 4, "cpu", 2)
    assert found.source.startswith("timed on cpu: ")
    assert found.tiles in list(tune_attention.candidates())[:2]


def test_tiles_that_do_not_run_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> float:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(tune_attention, "step_seconds", fails)
    with pytest.raises(RuntimeError, match="no candidate runs on this device"):
        tune_attention.tune(tune_attention.LLAMA_8B, torch.device("cpu"), dry=True)
