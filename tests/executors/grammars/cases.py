"""Grammars that every executor is tried with, and a fault of their masks."""

import json
from typing import Any

import pytest

from neaptide.executors.grammar_masks import GrammarMasks
from neaptide.executors.step_mask import Constrained

SCHEMAS: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 3, "maximum": 40},
    {"enum": ["red", "green", {"light": True}]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "size": {"enum": ["s", "m"]}},
        "required": ["name", "size"],
        "additionalProperties": False,
    },
]


def of_schema(schema: Any) -> str:
    """A random model has a weakness for white space."""
    return json.dumps({"grammars": [{"json_schema": schema | {"x-guidance": {"whitespace_flexible": False}}}]})


def masks_fail_for(request_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that fills masks raises wherever this request takes part."""
    find = GrammarMasks._find

    def raising(masks: GrammarMasks, constrained: list[Constrained]) -> Any:
        if any(request.request_id == request_id for request in constrained):
            raise RuntimeError("poison")
        return find(masks, constrained)

    monkeypatch.setattr(GrammarMasks, "_find", raising)
