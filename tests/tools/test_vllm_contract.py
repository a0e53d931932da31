"""The comparison of what we rely on in vLLM."""

import json
from copy import deepcopy

from tools.vllm_contract import ATTRIBUTES, CONTRACT, ENGINE_ARGUMENTS, SAMPLING, differences


def test_the_same_does_not_differ_and_everything_that_we_rely_on_was_found() -> None:
    agreed = json.loads(CONTRACT.read_text(encoding="utf-8"))
    assert differences(agreed, deepcopy(agreed)) == []
    assert None not in [*agreed["fields"].values(), *agreed["signatures"].values(), *agreed["constants"].values()]
    assert agreed["sampling"] == SAMPLING
    assert agreed["engine_arguments"] == ENGINE_ARGUMENTS
    assert agreed["attributes"] == {kind: list(names) for kind, names in ATTRIBUTES.items()}


def test_every_difference_is_a_line() -> None:
    agreed = {
        "fields": {"m:A": {"old": True, "free": False}, "m:B": {"x": True}},
        "signatures": {"m:f": ["self", "order"], "m:g": ["self"]},
        "constants": {"m:MOST": 128, "m:LEAST": 1, "m:LOST": 2},
        "sampling": ["seed"],
        "engine_arguments": ["model"],
        "attributes": {"m:C": ["a", "b"], "m:D": ["c"]},
        "all_engine_arguments": ["model", "seed"],
    }
    found = {
        "fields": {"m:A": {"free": True, "new": False, "must": True}, "m:B": None},
        "signatures": {"m:f": ["self", "order", "grammar"], "m:g": ["self"]},
        "constants": {"m:MOST": 64, "m:LEAST": 1},
        "sampling": [],
        "engine_arguments": ["model"],
        "attributes": {"m:C": ["b"]},
        "all_engine_arguments": ["model", "policy"],
    }
    assert differences(agreed, found) == [
        "m:A.old is gone",
        "m:A.free is required now",
        "m:A.new is new",
        "m:A.must is new, and required",
        "m:B is gone",
        "m:f(self, order) is (self, order, grammar)",
        "m:MOST is 64",
        "m:LOST is gone",
        "sampling: seed is gone",
        "m:C.a is gone",
        "m:D.c is gone",
        "engine_arguments: policy is new",
    ]
