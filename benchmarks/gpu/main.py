"""Runs the stages of ``benchmarks/gpu/run.sh``.

Correctness comes first, then Triton's kernels, the device's ceilings and calibration. The vllm executor, which depends
on none of those, comes last. Every stage writes its JSON when it ends, so that a run that is cut off keeps its results.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import REPOSITORY
from benchmarks.gpu import ceilings, vllm
from benchmarks.gpu.calibration import calibrate
from benchmarks.gpu.correctness import SCENARIOS, check_correctness, check_in_pieces
from benchmarks.gpu.live import measure_live, missing_packages
from benchmarks.gpu.steps import measure_steps
from neaptide.kernels.launching import why_not

OWN_STAGES = ("correctness", "kernels", "steps", "overlap", "ceilings", "calibration")
LIVE_STAGE = "live"
"""W5 on the torch executor, compared with other policies."""
W5_STAGES = tuple(f"vllm_w5_{part}" for part in vllm.W5_PARTS)
VLLM_STAGES = ("vllm", *W5_STAGES)
"""By default, this stage and the live stage are left out if there is no vLLM or no server."""
STAGES = (*OWN_STAGES, LIVE_STAGE, *VLLM_STAGES)
LIMIT_S = 570.0
"""Limit of our own stages together; calibration is stopped in time for it. Each other stage has the same limit of its
own."""
OUTPUT_TOKENS, DRY_OUTPUT_TOKENS = 32, 4
DRY_EXECUTOR: dict[str, Any] = {
    "scenarios": SCENARIOS[-1:],
    "prompt_tokens": (1, 17),
    "dtypes": (torch.float32,),
}
"""The smaller set that the executor computes with interpreted kernels."""


class Skipped(Exception):
    """A stage was left out; the message is the reason."""


class Run:
    def __init__(self, *, dry: bool, limit_s: float = LIMIT_S, out: Path | None = None) -> None:
        self.start_s = time.monotonic()
        self.dry = dry
        self.limit_s = limit_s
        self.device = torch.device("cpu" if dry else "cuda")
        self.results: dict[str, Any] = {
            "device": "cpu (dry run)" if dry else torch.cuda.get_device_name(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": _commit(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "dry": dry,
            "stages": {},
        }
        self.out = out or REPOSITORY / "benchmarks" / "results" / self._folder_name()
        self.out.mkdir(parents=True, exist_ok=True)
        self.say(f"{self.results['device']}, results in {self.out}")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start_s:6.1f} s] {text}", flush=True)

    def stage(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Runs one stage; an error becomes part of its result."""
        self.say(f"{name} ...")
        start_s = time.monotonic()
        try:
            found = {"status": "done"} | work()
        except Skipped as reason:
            found = {"status": "skipped", "reason": str(reason)}
        except Exception as error:
            traceback.print_exc()
            found = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        found["seconds"] = time.monotonic() - start_s
        self.results["stages"][name] = found
        self._write(f"{name}.json", found)
        self.say(f"{name}: {found['status']}" + (f" ({found['reason']})" if "reason" in found else ""))

    def work_of(self, name: str) -> Callable[[], dict[str, Any]]:
        if name in W5_STAGES:
            return partial(self.vllm_w5, vllm.W5_PARTS[W5_STAGES.index(name)])
        work: Callable[[], dict[str, Any]] = getattr(self, name)
        return work

    def correctness(self) -> dict[str, Any]:
        num_outputs = DRY_OUTPUT_TOKENS if self.dry else OUTPUT_TOKENS
        found = check_correctness(self.device, num_outputs)
        if not self.dry:  # torch cannot limit its memory on a CPU
            found["cases"].append(check_in_pieces(self.device, num_outputs))
            found["ok"] = all(case["ok"] for case in found["cases"])
        for case in found["cases"]:
            self.say(
                f"{case['dtype']} {case['scenario']}: {'right' if case['ok'] else 'WRONG'}, "
                f"{case['tokens_compared']} of {case['tokens']} tokens compared, log-probabilities within "
                f"{case['max_logprob_difference']:.2g} ({case['logprob_tolerance']:.2g} allowed)"
            )
        return found if found["ok"] else found | {"status": "failed", "reason": "the executor's output is wrong"}

    def kernels(self) -> dict[str, Any]:
        self._require_triton()
        from benchmarks.gpu.kernels import measure_kernels  # imports Triton

        found = measure_kernels(self.device, dry=self.dry, progress=self.say)
        how = DRY_EXECUTOR if self.dry else {}
        num_outputs = DRY_OUTPUT_TOKENS if self.dry else OUTPUT_TOKENS
        checked = check_correctness(self.device, num_outputs, gpu_kernels="triton", **how)
        found |= {"executor": checked["cases"]}
        if not (found["ok"] and checked["ok"]):
            return found | {"status": "failed", "reason": "the kernels' results differ from torch's"}
        return found

    def steps(self) -> dict[str, Any]:
        return measure_steps(self.device, dry=self.dry, progress=self.say)

    def overlap(self) -> dict[str, Any]:
        self._require_triton()
        from benchmarks.gpu.overlap import measure_overlap  # imports Triton

        return measure_overlap(self.device, dry=self.dry, progress=self.say)

    def ceilings(self) -> dict[str, Any]:
        return ceilings.measure_ceilings(self.device, ceilings.DRY if self.dry else ceilings.FULL, self.say)

    def calibration(self) -> dict[str, Any]:
        if self.results["stages"].get("correctness", {}).get("status") == "failed":
            raise Skipped("step times of an incorrect executor mean nothing")
        left_s = self.limit_s - (time.monotonic() - self.start_s)
        if left_s <= 0:
            raise Skipped("no time is left")
        path = self.out / "profile.json"
        profile = calibrate(self.device, path, dry=self.dry, timeout_s=left_s, progress=self.say)
        profile["commit"] = profile["commit"] or self.results["commit"]
        self._write(path.name, profile)
        return {"profile": profile}

    def live(self) -> dict[str, Any]:
        self._require_server()
        kept_in = self.out / "live"
        return measure_live(self.device, dry=self.dry, limit_s=self.limit_s, kept_in=kept_in, progress=self.say)

    def vllm(self) -> dict[str, Any]:
        return vllm.measure_steps(self._vllm_python(), self.device, dry=self.dry, progress=self.say)

    def vllm_w5(self, part: str) -> dict[str, Any]:
        self._require_server()
        if self.results["stages"].get("vllm", {}).get("status") == "failed":
            raise Skipped("the executor fails on its own, so a comparison with rivals means nothing")
        state = self.out / "vllm_w5_state.json"
        if part == vllm.W5_PARTS[0]:
            state.unlink(missing_ok=True)
        elif not state.exists():
            raise Skipped(f"vllm_w5_{vllm.W5_PARTS[0]} left no state in {self.out}")
        found = vllm.measure_w5(self._vllm_python(), self.device, part, state, dry=self.dry, progress=self.say)
        self._write("vllm_w5.json", found)
        return found

    def _require_triton(self) -> None:
        if reason := why_not(self.device):
            raise Skipped(f"{reason}{'; TRITON_INTERPRET=1 interprets' if self.dry else ''}")

    @staticmethod
    def _require_server() -> None:
        if missing := missing_packages():
            raise Skipped(f"this interpreter has no {', '.join(missing)}, which the server needs")

    @staticmethod
    def _vllm_python() -> Path:
        if (python := vllm.find_python()) is None:
            raise Skipped("no interpreter has vLLM: set PYTHON_VLLM")
        return python

    def finish(self) -> int:
        """Writes all results into one file. Returns 1 if a stage failed or was skipped."""
        self.results["seconds"] = time.monotonic() - self.start_s
        self._write("results.json", self.results)
        statuses = {name: stage["status"] for name, stage in self.results["stages"].items()}
        self.say(f"{self.out / 'results.json'}: {statuses}")
        return 0 if set(statuses.values()) <= {"done"} else 1

    def _write(self, name: str, content: dict[str, Any]) -> None:
        (self.out / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def _folder_name(self) -> str:
        device = re.sub(r"[^a-z0-9]+", "-", self.results["device"].lower()).strip("-")
        return f"{self.results['date'][:10]}-{device}"


def _commit() -> str:
    """``$COMMIT``, or the checkout's commit; a copy may have no history."""
    if commit := os.environ.get("COMMIT"):
        return commit
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run.sh", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="run the same code on the CPU with tiny sizes")
    parser.add_argument(
        "--stages", metavar="NAME,...", help=f"stages to run, of {', '.join(STAGES)}; vllm_w5 is its four"
    )
    limit_help = f"limit of our own stages together without {LIVE_STAGE}, and again of that ({LIMIT_S:.0f})"
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, metavar="S", help=limit_help)
    args = parser.parse_args(argv)
    has_vllm = vllm.find_python() is not None
    has_server = not missing_packages()
    can_run = (*OWN_STAGES, *((LIVE_STAGE,) if has_server else ()), *(VLLM_STAGES if has_vllm else ()))
    asked = args.stages.split(",") if args.stages else can_run
    stages = [stage for name in asked for stage in (W5_STAGES if name == "vllm_w5" else (name,))]
    if unknown := set(stages) - set(STAGES):
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    if not args.dry and not torch.cuda.is_available():
        print("benchmarks/gpu/run.sh: torch sees no CUDA device; --dry runs on the CPU", file=sys.stderr)
        return 2
    out = os.environ.get("OUT")
    run = Run(dry=args.dry, out=Path(out) if out else None, limit_s=args.limit_s)
    if not args.stages and not has_server:
        run.say(f"this interpreter has no {', '.join(missing_packages())}: without {LIVE_STAGE}")
    if not args.stages and not has_vllm:
        run.say(f"no interpreter has vLLM (set PYTHON_VLLM): without {', '.join(VLLM_STAGES)}")
    for name in STAGES:
        if name in stages:
            run.stage(name, run.work_of(name))
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
