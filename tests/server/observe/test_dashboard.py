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
from neaptide.server.app import ServerState, create_app
from neaptide.server.http.auth import KeyRing
from neaptide.server.observe.facts import ServerFacts
from neaptide.server.observe.history import Absence, Interval
from neaptide.server.observe.overview import Report, merged_report, recent, view
from neaptide.server.observe.status import Severity
from neaptide.server.openai.stored_replies import Batch, BatchExtension
from neaptide.server.routes import dashboard
from neaptide.server.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL_ID, USER, Server, make_context, make_server

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


async def test_the_root_is_the_page_and_needs_no_key(tokenizer: Tokenizer) -> None:
    app = create_app(ServerState(context=make_context(tokenizer), keys=KeyRing(("alpha",))))
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.get("/")).text == (await http.get("/dashboard")).text
        assert (await http.get("/dashboard/data")).status_code == 200


async def test_profiles_are_offered_as_a_list(tokenizer: Tokenizer) -> None:
    app = create_app(ServerState(context=make_context(tokenizer), profiles=("h100", "<b>")))
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
        text = (await http.get("/dashboard")).text
    assert '<option value="">this server</option><option>h100</option><option>&lt;b&gt;</option></select>' in text


async def test_the_data_has_what_the_page_shows(server: Server) -> None:
    chat = {"messages": USER, "max_tokens": 3}
    (await server.http.post("/v1/chat/completions", json=chat)).raise_for_status()
    server.engine.emit_stats(online_decode_tokens=3, running_online=2)
    found = (await server.http.get("/dashboard/data")).json()
    assert found["status"]["severity"] == "ok"
    assert found["status"]["sentence"].startswith("The only chat of the last 5 minutes met both targets: TTFT p99 ")
    facts = {name: found["facts"][name] for name in ("model", "device", "dtype", "ttft_slo_s", "tpot_slo_s")}
    expected = {"model": MODEL_ID, "device": "cpu", "dtype": "float32", "ttft_slo_s": 30.0, "tpot_slo_s": 30.0}
    assert facts == expected
    assert [(one["name"], one["met"], one["judged"]) for one in found["latencies"]] == [("TTFT", 1, 1), ("TPOT", 1, 1)]
    assert (found["now"]["running_online"], found["now"]["errors"]) == (2, 0)
    assert [one["ended"] for one in found["tiers"]] == [0, 1, 0]
    assert (found["late"], found["comparison"], found["replays"]) == ([], None, False)


async def test_a_late_chat_is_listed_by_its_name_in_the_log(tokenizer: Tokenizer) -> None:
    server = make_server(tokenizer)
    server.context.ttft_slo_s = 1e-9
    chat = {"messages": USER, "max_tokens": 3}
    reply = (await server.http.post("/v1/chat/completions", json=chat)).json()
    (late,) = (await server.http.get("/dashboard/data")).json()["late"]
    assert reply["id"].endswith(late["request"])
    assert (late["tier"], late["ttft_slo_s"], late["ttft_s"] > 0) == ("default", 1e-9, True)
    await server.openai.close()


async def test_what_ended_the_engine_is_told(server: Server) -> None:
    server.context.client.last_end = "exit status 1"
    server.engine.die()
    found = (await server.http.get("/dashboard/data")).json()
    assert found["status"]["severity"] == "bad"
    assert found["status"]["cause"] == "It ended: exit status 1."
    ((start_s, end_s),) = ((one["start_s"], one["end_s"]) for one in found["absences"])
    assert start_s <= found["at_s"]
    assert end_s is None


def test_two_reports_are_one_on_a_gateway() -> None:
    facts = ServerFacts(model="m", ttft_slo_s=1.0, started_s=50)
    reports = {
        "a": Report(at_s=100.0, facts=facts, occupancy=(1,) * 9, pending_lines=7, in_flight={"default": 2}),
        "b": Report(
            at_s=100.0,
            facts=facts,
            is_up=False,
            pending_lines=7,
            in_flight={"default": 1},
            absences=[Absence(99.0)],
        ),
    }
    found = view(merged_report(reports, 100.0), reports)
    assert (
        found["status"]["sentence"] == "b: The engine has been down for 0 s. New chats get 503 until it has restarted."
    )
    assert (found["now"]["running_online"], found["pending_lines"]) == (1, 7)
    assert [one["in_flight"] for one in found["tiers"]] == [0, 3, 0]
    assert found["absences"] == [{"start_s": 99.0, "end_s": None}]
    assert view(merged_report({}, 100.0), {})["status"]["sentence"] == "No replica answers. Every request gets 503."


def test_the_time_without_an_engine_is_of_each_window_its_part() -> None:
    report = Report(at_s=1000.0, absences=[Absence(600.0, 720.0), Absence(930.0, 945.0), Absence(999.0)])
    assert [recent(report, seconds).away_s for seconds in (60, 300)] == [6.0, 36.0]


def test_the_page_knows_the_data_and_the_batch_object() -> None:
    report = Report(at_s=100.0)
    shown = view(report) | {"replicas": []}
    assert set(re.findall(r"\bseen\.(\w+)", SCRIPT)) <= set(shown) | set(BatchExtension.__annotations__)
    assert set(re.findall(r"\bnow\.(\w+)", SCRIPT)) <= set(shown["now"])
    assert set(re.findall(r"\bfacts\.(\w+)", SCRIPT)) <= set(shown["facts"])
    assert set(re.findall(r"\bbatch\.(\w+)", SCRIPT)) <= set(Batch.__annotations__)
    report.intervals = [Interval(start_s=60)]
    assert set(re.findall(r"\bpoints\.(\w+)", SCRIPT)) <= set(view(report)["points"])
    styles = (Path(dashboard.__file__).parent / "dashboard.css").read_text(encoding="utf-8")
    assert all(f".{outlook.value}" in styles for outlook in DeadlineStatus)
    assert all(f".{severity.value} {{" in styles and f"{severity.value}: " in SCRIPT for severity in Severity)


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
