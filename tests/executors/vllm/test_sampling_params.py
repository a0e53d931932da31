"""Every sampling parameter reaches vLLM, under its name and with its value. No vLLM is needed to see that."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec
import pytest

from neaptide.engine.params import SamplingParams
from tests.executors.vllm.sampling_cases import CASES, EVERYTHING, PLAIN, Case

MODULE = "neaptide.executors.vllm.sampling"
KEPT_FROM_VLLM = {"grammar"}
"""Its masks are filled here."""


class Kept(dict[str, Any]):
    """In the place of vLLM's class: what it was given, by name."""


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, over a package of that name which has no more than the class."""
    package = ModuleType("vllm")
    package.SamplingParams = Kept  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    kept = sys.modules.pop(MODULE, None)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE)
    if kept is not None:
        sys.modules[MODULE] = kept


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_vllm_is_told_each_value_under_its_name(sampling: Any, case: Case) -> None:
    assert sampling.to_vllm(case.params, case.eos_token_ids, case.seed) == case.told


def test_the_table_leaves_no_parameter_at_its_default() -> None:
    """Or one that is dropped, or a new one that is forgotten, would not be seen."""
    defaults = SamplingParams()
    left = {
        name
        for name in SamplingParams.__struct_fields__
        if getattr(EVERYTHING, name) == getattr(defaults, name) and name not in KEPT_FROM_VLLM
    }
    assert left == {"ignore_eos"}, "that one has a case of its own"
    told = CASES["everything"].differs
    assert set(PLAIN) - set(told) == {"ignore_eos", "detokenize"}
    numbers = [value for value in msgspec.structs.asdict(EVERYTHING).values() if isinstance(value, int | float)]
    assert len(numbers) == len(set(numbers)), "a value may be taken for another's"


def test_a_draw_has_a_seed_of_its_own(sampling: Any) -> None:
    """For each seed, or request without one, and each output position; and always the same."""
    asked = [(seed, position) for seed in (0, 1, -1, 10, "a", "b") for position in (-1, 0, 1, 11)]
    seeds = [sampling.draw_seed(*each) for each in asked]
    assert len(set(seeds)) == len(asked)
    assert seeds == [sampling.draw_seed(*each) for each in asked]
    assert all(0 <= seed < 2**63 for seed in seeds)
