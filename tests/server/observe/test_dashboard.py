"""The dashboard: one page that asks this server alone, and knows the names that the server uses."""

import base64
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import httpx2
import pytest

from neaptide.engine.messages import DeadlineStatus
from neaptide.engine.params import Tier
from neaptide.server.app import ServerState, create_app
from neaptide.server.counterfactual.metrics import POLICIES
from neaptide.server.http.auth import KeyRing
from neaptide.server.openai.stored_replies import Batch, BatchExtension
from neaptide.server.routes import dashboard
from neaptide.server.text.tokenizer import Tokenizer
from tests.deploy.test_deploy import series
from tests.server.conftest import Server, make_context

SCRIPT = dashboard.script()
NEEDS_NODE = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


async def test_the_page_carries_everything_and_may_load_nothing_from_elsewhere(server: Server) -> None:
    reply = await server.http.get("/dashboard")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert set(re.findall(r"\w+://[^\"';]*", reply.text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"<!-- (css|js) -->|\bsrc=|@import|url\(", reply.text)
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = reply.headers["content-security-policy"]
    assert f"script-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "connect-src 'self'" in policy


async def test_with_keys_the_page_asks_for_one_before_it_asks_for_batches(tokenizer: Tokenizer) -> None:
    for keys, form in ((("alpha",), '<form id="key">'), ((), '<form id="key" hidden>')):
        app = create_app(ServerState(context=make_context(tokenizer), keys=KeyRing(keys)))
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
            assert form in (await http.get("/dashboard")).text


def test_every_metric_that_the_page_reads_exists() -> None:
    named = set(re.findall(r"neaptide_\w+_\w+", SCRIPT))
    assert len(named) > 15
    assert named <= series()


def test_the_page_knows_the_batch_object_and_its_outlook() -> None:
    assert set(re.findall(r"\bbatch\.(\w+)", SCRIPT)) <= set(Batch.__annotations__)
    named = set(re.findall(r"\bseen\.(\w+)", SCRIPT))
    assert named == set(BatchExtension.__annotations__)
    styles = (Path(dashboard.__file__).parent / "dashboard.css").read_text(encoding="utf-8")
    assert all(f".{outlook.value} " in styles for outlook in DeadlineStatus)


def test_the_page_shows_every_tier() -> None:
    (listed,) = re.findall(r"const TIERS = \[(.*)\]", SCRIPT)
    assert re.findall(r'"(\w+)"', listed) == [tier.value for tier in Tier]


def test_the_page_shows_every_shadow() -> None:
    (listed,) = re.findall(r"const OTHERS = \[(.*)\]", SCRIPT)
    assert tuple(re.findall(r'"(\w+)"', listed)) == POLICIES


def test_the_page_writes_no_markup_of_what_it_is_told() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", SCRIPT)


@NEEDS_NODE
def test_the_script_is_a_script(tmp_path: Path) -> None:
    path = tmp_path / "dashboard.js"
    path.write_text(SCRIPT)
    assert subprocess.run(["node", "--check", str(path)], capture_output=True).returncode == 0


@NEEDS_NODE
def test_the_pages_figures_are_right() -> None:
    cases = Path(__file__).with_name("dashboard_cases.js")
    done = subprocess.run(["node", str(cases)], input=SCRIPT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
