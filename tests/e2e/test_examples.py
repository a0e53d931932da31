"""The scripts of ``examples/`` against the embedded model, and the addresses that its page names."""

import re
import runpy
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import KEYS
from tests.e2e.server import RunningServer

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
PRINTED = {
    "chat.py": ["55", "12"],
    "batch.py": ["completed", "sum-10", "44", "sum-19", "53"],
    "structured.py": ["working=", "answer=55"],
    "tools.py": ["get_weather {'city': 'paris'}"],
}
"""What each script prints, among other words, in this order."""


@pytest.mark.parametrize("name", PRINTED)
def test_the_example_prints_what_it_is_for(
    name: str, embedded: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEAPTIDE_BASE_URL", embedded.base_url.removesuffix("/v1"))
    monkeypatch.setenv("NEAPTIDE_API_KEY", KEYS[0])
    variables = runpy.run_path(str(EXAMPLES / name))
    variables["client"].close()
    assert re.search(".*".join(map(re.escape, PRINTED[name])), capsys.readouterr().out, re.DOTALL)


def test_every_script_has_a_test_and_stands_on_the_page() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == PRINTED.keys() | {"own_policy.py"}  # its test is test_own_policy.py
    assert set(re.findall(r"examples/(\w+\.py)", page)) == scripts


def test_the_addresses_of_the_walk_are_those_that_compose_opens() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    (file,) = set(re.findall(r"docker compose --file (\S+)", page))
    compose = yaml.safe_load((REPOSITORY / file).read_text(encoding="utf-8"))
    opened = {port.split(":")[1] for service in compose["services"].values() for port in service["ports"]}
    assert set(re.findall(r"http://127\.0\.0\.1:(\d+)", page.partition("## With")[2])) == opened
