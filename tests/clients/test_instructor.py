"""``instructor``: a pydantic object by a forced call, by any object and by a schema."""

import pytest

from tests.clients.environment import ClientEnvironment
from tests.e2e.server import RunningServer

INSTRUCTOR = ClientEnvironment("instructor")
pytestmark = INSTRUCTOR.marks


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "TOOLS_STRICT"])
def test_an_object_of_the_class(server: RunningServer, mode: str) -> None:
    seen = INSTRUCTOR.drive(mode, server.base_url)
    assert seen["side"] in ("left", "right")
    assert 0 <= seen["steps"] <= 9


def test_an_object_of_any_kind(server: RunningServer) -> None:
    assert INSTRUCTOR.drive("JSON", server.base_url)["text"].startswith("{")
