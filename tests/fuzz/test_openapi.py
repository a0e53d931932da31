"""The document against the server: schemathesis sends what it describes and what it does not.

After every case the same greedy request must still give the same text.
"""

from collections import Counter
from typing import Any

import httpx2
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fuzz.app import FuzzedApp
from tests.server.conftest import MODEL_ID

Operation = APIOperation[Any, Any, Any, Any]
GeneratedCase = Case[Any]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
WITH_BODY, WITHOUT_BODY = 4, 1
"""Cases of an operation in each round."""
CASES = 20


def operations_of(app: FuzzedApp) -> list[Operation]:
    schema = schemathesis.openapi.from_dict(app.request("GET", "/openapi.json").json())
    schema.config.generation.update(allow_x00=True)
    return [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]


def send(app: FuzzedApp, case: GeneratedCase) -> httpx2.Response:
    prepared = requests.Request(**case.as_transport_kwargs("http://test")).prepare()
    assert prepared.method is not None
    assert prepared.url is not None
    headers = [(_bytes(name), _bytes(value)) for name, value in prepared.headers.items()]
    return app.send(
        httpx2.Request(prepared.method, prepared.url, headers=headers, content=_bytes(prepared.body or b""))
    )


def _bytes(value: Any) -> bytes:
    assert isinstance(value, str | bytes)
    return value.encode("latin-1") if isinstance(value, str) else value


def fuzz(app: FuzzedApp, mode: GenerationMode, num_cases: int) -> Counter[int]:
    """Rounds over all operations, each with a seed of its own, until so many cases were sent; counts by status."""
    operations = operations_of(app)
    if mode is GenerationMode.NEGATIVE:
        # Where any text will do, as in a path or in X-Request-Id, no negative case exists.
        operations = [operation for operation in operations if operation.body or operation.query]
    statuses: Counter[int] = Counter()
    round_ = 0
    while statuses.total() < num_cases:
        for operation in operations:
            wanted = min(WITH_BODY if operation.body else WITHOUT_BODY, num_cases - statuses.total())
            if wanted:
                statuses += fuzz_operation(app, operation, mode, wanted, round_)
        round_ += 1
    return statuses


def fuzz_operation(
    app: FuzzedApp, operation: Operation, mode: GenerationMode, num_cases: int, number: int
) -> Counter[int]:
    statuses: Counter[int] = Counter()

    @seed(number)
    @settings(
        max_examples=num_cases,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: GeneratedCase) -> None:
        if isinstance(case.body, dict) and "model" in case.body and mode is GenerationMode.POSITIVE:
            case.body["model"] = MODEL_ID  # or nearly all would end as 404
        reply = send(app, case)
        case.validate_response(reply, checks=CHECKS)
        app.check_canary()
        statuses[reply.status_code] += 1

    check()
    return statuses


@pytest.mark.acceptance("A23", "generated requests, as documented and not, with a canary after each", count=CASES)
@pytest.mark.parametrize("mode", GenerationMode)
def test_generated_requests(fuzzed: FuzzedApp, mode: GenerationMode) -> None:
    assert fuzz(fuzzed, mode, CASES).total() >= CASES


@pytest.mark.full
@pytest.mark.acceptance("A23", "generated requests, as documented and not, with a canary after each", count=5_000)
def test_five_thousand_generated_requests(fuzzed: FuzzedApp) -> None:
    for mode in GenerationMode:
        statuses = fuzz(fuzzed, mode, 2_500)
        assert statuses.total() >= 2_500
        print(mode.value, dict(statuses))
