"""Function calling cases of the Berkeley leaderboard as requests: the shape of what comes, not the model's wisdom.

The files are no part of this repository: ``STRUCTURED_CASES`` names their folder (``bfcl-*.jsonl.gz``: question,
function and expected calls of a case a line).
"""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.e2e.server import RunningServer, result_lines, submit_batch, wait_terminal

MODEL = "neaptide/tiny"
CASES = Path(os.environ.get("STRUCTURED_CASES", Path(__file__).parents[4] / "shared" / "structured"))
FILES = ("bfcl-simple_python.jsonl.gz", "bfcl-multiple.jsonl.gz", "bfcl-parallel.jsonl.gz")
KINDS = {"dict": "object", "float": "number", "tuple": "array"}
"""The cases name types as Python does."""
BOUNDS: dict[str, dict[str, Any]] = {
    "string": {"maxLength": 12},
    "integer": {"minimum": -999, "maximum": 999},
    "array": {"maxItems": 2},
}
"""So that a model without wisdom comes to an end."""
pytestmark = pytest.mark.skipif(not CASES.exists(), reason=f"no {CASES}")


def in_json_schema(node: dict[str, Any]) -> dict[str, Any]:
    kind = KINDS.get(node["type"], node["type"])
    schema = {key: node[key] for key in ("required", "enum", "description") if key in node}
    if kind != "any":
        schema |= {"type": kind, **BOUNDS.get(kind, {})}
    if "properties" in node:  # others name what they require only, and closed could not have it
        schema["additionalProperties"] = False
        schema["properties"] = {name: in_json_schema(child) for name, child in node["properties"].items()}
    if isinstance(node.get("items"), dict):
        schema["items"] = in_json_schema(node["items"])
    return schema


def bodies_of(file: str, choice: str, limit: int | None = None) -> list[dict[str, Any]]:
    """One request a case: calls are forced, for whether to call is wisdom.

    ``choice`` is "required", with parallel calls where the cases have them, or "named", which is the last function.
    """
    bodies = []
    for line in gzip.decompress((CASES / file).read_bytes()).splitlines()[:limit]:
        case = json.loads(line)
        functions = [f | {"parameters": in_json_schema(f["parameters"])} for f in case["function"]]
        tools = [{"type": "function", "function": function} for function in functions]
        last = {"type": "function", "function": {"name": functions[-1]["name"]}}
        bodies.append(
            {
                "model": MODEL,
                "messages": case["question"][0],
                "tools": tools,
                "tool_choice": "required" if choice == "required" else last,
                "parallel_tool_calls": "parallel" in file,
                "max_tokens": 300,
                "temperature": 0,
            }
        )
    return bodies


def check(body: dict[str, Any], reply: dict[str, Any]) -> bool:
    """Whether it called: every call is of a function that was offered and fits its parameters.

    The last call of an answer that was cut may lack its end.
    """
    (choice,) = reply["choices"]
    calls = choice["message"].get("tool_calls") or []
    assert choice["finish_reason"] in ("tool_calls", "length")
    assert calls or choice["finish_reason"] == "length"
    assert (body["parallel_tool_calls"] and body["tool_choice"] == "required") or len(calls) <= 1
    parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}
    for call in calls:
        if body["tool_choice"] != "required":
            assert call["function"]["name"] == body["tool_choice"]["function"]["name"]
        schema = parameters[call["function"]["name"]]
        try:
            # A number may be valid and too large for a float: the validator would take infinity for null.
            arguments = json.loads(
                call["function"]["arguments"], parse_float=lambda text: max(min(float(text), 1e300), -1e300)
            )
        except ValueError:
            assert choice["finish_reason"] == "length"
            assert call is calls[-1]
            return len(calls) > 1
        jsonschema_rs.validator_for(schema).validate(arguments)
    return bool(calls)


def called_share(server: RunningServer, bodies: list[dict[str, Any]]) -> float:
    batch = wait_terminal(server, submit_batch(server, bodies))
    assert batch["request_counts"] == {"total": len(bodies), "completed": len(bodies), "failed": 0}
    replies = {line["custom_id"]: line["response"]["body"] for line in result_lines(server, batch)}
    return sum(check(body, replies[f"c{index}"]) for index, body in enumerate(bodies)) / len(bodies)


@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_few_of_each_kind(embedded: RunningServer, choice: str) -> None:
    assert called_share(embedded, [body for file in FILES for body in bodies_of(file, choice, 3)]) > 0.5


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("file", FILES)
def test_all_of_them(embedded: RunningServer, file: str, choice: str) -> None:
    share = called_share(embedded, bodies_of(file, choice))
    print(f"{file}, {choice}: {share:.1%} called, the others were cut before")
    assert share > 0.5
