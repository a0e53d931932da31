"""docs/write-a-policy.md names what is there."""

import re
from operator import attrgetter
from pathlib import Path

import neaptide.policy
from tests.engine.harness import Harness

PAGE = (Path(__file__).parents[2] / "docs" / "write-a-policy.md").read_text()


def test_every_call_of_the_page_is_there() -> None:
    scheduler = Harness().core.scheduler
    draft = scheduler.draft(0.0)
    calls = set(re.findall(r"\bdraft\.([a-z_.]*[a-z])", PAGE))
    assert len(calls) > 20
    for call in calls:
        attrgetter(call)(draft)
    for name in set(re.findall(r"\bself\.([a-z_]+)", PAGE)) - {"next_waiting", "start"}:
        assert hasattr(scheduler, name)


def test_every_name_that_the_page_imports_is_public() -> None:
    names = {name for found in re.findall(r"from neaptide\.policy import (.*)", PAGE) for name in found.split(", ")}
    assert names <= set(neaptide.policy.__all__)
    assert all(hasattr(neaptide.policy, name) for name in neaptide.policy.__all__)
