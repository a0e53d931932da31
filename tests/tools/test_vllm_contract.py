"""The comparison of what we rely on in vLLM."""

import json
from copy import deepcopy

import pytest
from pydantic import ValidationError

from neaptide.executors.registry import EXECUTORS
from neaptide.server.openai.schemas import ChatBody
from tests.executors.vllm.sampling_cases import MOST_BIASES
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


def test_what_the_api_lets_through_the_second_runner_takes() -> None:
    constants = json.loads(CONTRACT.read_text(encoding="utf-8"))["constants"]
    limits = {name.rpartition(":")[2]: value for name, value in constants.items()}
    assert limits == {
        "MAX_NUM_STOP_TOKEN_IDS": EXECUTORS["vllm"].max_masked_ends,
        "MAX_NUM_LOGIT_BIAS_TOKENS": MOST_BIASES,
    }
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    bias = {str(token): 1.0 for token in range(MOST_BIASES)}
    assert len(ChatBody.model_validate(body | {"logit_bias": bias}).logit_bias) == MOST_BIASES
    with pytest.raises(ValidationError, match="at most 1024 items"):
        ChatBody.model_validate(body | {"logit_bias": bias | {"-1": 1.0}})
