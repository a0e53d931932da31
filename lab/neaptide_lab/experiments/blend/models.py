"""BlendServe's figures 12 and 7b: the gain on other models, with traces made for each of them."""

import logging

from neaptide.estimator.analytic import DEEPSEEK_67B, LLAMA_2_7B, LLAMA_3_70B, QWEN2_5_7B, QWEN2_5_72B, ModelShape
from neaptide.estimator.device_profile import load_profile
from neaptide.loadgen.workloads.blend_sets import TRACE_TARGETS
from neaptide_lab.experiments.blend.pools import Mix
from neaptide_lab.experiments.blend.runs import BlendCase, run_all
from neaptide_lab.experiments.blend.setting import QUICK, TRACES
from neaptide_lab.experiments.blend.tables import (
    COMPARED,
    OPTIMUM_NOTE,
    bars,
    compared,
    describe,
    gain,
    mean,
    numbers,
    of_optimum,
    summary,
)
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "blend-models"
ABOUT = "gain over depth first on five other models (BlendServe, figures 12 and 7b)"

LARGE = "a100-80g-llama-3-70b-tp8"
MODELS: dict[str, ModelShape] = {
    "a100-80g-qwen2.5-7b": QWEN2_5_7B,
    "a100-80g-llama-2-7b": LLAMA_2_7B,
    "a100-80g-qwen2.5-72b-tp8": QWEN2_5_72B,
    "a100-80g-deepseek-67b-tp8": DEEPSEEK_67B,
    LARGE: LLAMA_3_70B,
}
QUICK_MODELS = ("a100-80g-qwen2.5-7b",)
FLOPS, BYTES_PER_S = 312e12, 2.039e12
"""From an A100's data sheet, as in ``blend_sets``."""
PAPER_GAIN, PAPER_LARGEST, PAPER_OPTIMUM = 1.152, 1.244, 0.899
"""The paper's values for the first four."""
PAPER_LARGE_GAIN, PAPER_LARGE_OPTIMUM = 1.186, 0.908
"""The paper's values for the last one."""


def run(quick: bool) -> ExperimentResult:
    cases = {
        f"{name}, trace {number}": BlendCase.of(_mix(name, number), QUICK, load_profile(name))
        for name in (QUICK_MODELS if quick else MODELS)
        for number in (TRACES[:1] if quick else TRACES)
    }
    found = run_all(cases, COMPARED, logging.getLogger(__name__))
    rows = [row for name, ways in found.items() for row in compared(name, cases[name], ways)]
    others = {name: ways for name, ways in found.items() if not name.startswith(LARGE)}
    rows += summary(cases, others, is_judged=not quick, paper_gain=PAPER_GAIN, paper_optimum=PAPER_OPTIMUM)
    rows.append(Row("largest: blendserve over dfs", max(gain(w, "blendserve") for w in others.values()), PAPER_LARGEST))
    large = {name: ways for name, ways in found.items() if name.startswith(LARGE)}
    if large:
        gains = [gain(ways, "blendserve") for ways in large.values()]
        shares = [of_optimum(cases[name], ways["blendserve"]) for name, ways in large.items()]
        rows += [
            Row("70B on eight devices: blendserve over dfs", mean(gains), PAPER_LARGE_GAIN, "", 3),
            Row("70B on eight devices: blendserve, of the optimum", mean(shares), PAPER_LARGE_OPTIMUM, "", 3),
        ]
    notes = [
        describe(QUICK, "the profile of each model"),
        "Traces are made for each model, as in the paper: with its parameters and the bytes that it caches, on the "
        "device's data sheet. All-reduces between eight devices overlap with nothing here, in the paper they do.",
        OPTIMUM_NOTE,
    ]
    return ExperimentResult(NAME, rows, notes, {"runs": numbers(cases, found)}, lambda figure: bars(figure, found))


def _mix(name: str, number: int) -> Mix:
    return Mix(*TRACE_TARGETS[number], density_tokens=density_tokens(MODELS[name]))


def density_tokens(model: ModelShape) -> float:
    """K of the model (``blend_sets``); more devices change nothing, for each brings compute and bandwidth."""
    return model.weight_bytes * BYTES_PER_S / (FLOPS * model.kv_bytes_per_token)
