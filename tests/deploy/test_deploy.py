"""What operators use: every series on the board and in the alerts exists, and the files are what their readers take."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from neaptide.cluster.gateway.metrics import GatewayMetrics, ReplicaLives
from neaptide.server.batches.metrics import BatchMetrics
from neaptide.server.batches.running.deadline_status import BatchStatuses
from neaptide.server.batches.storing.store import Store
from neaptide.server.counterfactual.metrics import ShadowMetrics
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.engine_client.engine_state import EngineState
from neaptide.server.http.hosts import HostFilter
from neaptide.server.observe.facts import ServerFacts
from neaptide.server.observe.metrics import ServerMetrics
from neaptide.server.observe.metrics_engine import EngineMetrics
from neaptide.server.observe.metrics_http import OF_A_GATEWAY, HttpMetrics
from neaptide.server.observe.metrics_info import InfoMetrics
from neaptide.server.settings import OPTIONS, split_list
from tools import grafana_board

DEPLOY = Path(__file__).parents[2] / "deploy"
OF_THE_PROCESS = {"process_start_time_seconds"}


def all_series() -> CollectorRegistry:
    """What a server and a gateway can expose of their own."""
    registry = CollectorRegistry()
    ServerMetrics(registry)
    EngineMetrics(registry, EngineState(EngineClient(), lambda: 0.0))
    InfoMetrics(registry, ServerFacts)
    BatchMetrics(registry, Store(Path()), lambda: 0.0, BatchStatuses())
    ShadowMetrics(registry)
    GatewayMetrics(registry)
    ReplicaLives(registry, {})
    HttpMetrics(registry, OF_A_GATEWAY)
    return registry


def series() -> set[str]:
    """The names of all samples of them."""
    names: set[str] = set()
    for family in all_series().collect():
        by_type = {"counter": ("_total",), "histogram": ("_sum", "_count", "_bucket")}
        names |= {family.name + suffix for suffix in by_type.get(family.type, ("",))}
    return names


def named_in(text: str) -> set[str]:
    return set(re.findall(r"\bneaptide_\w+", text))


def loaded(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def test_the_board_is_what_its_maker_makes() -> None:
    assert grafana_board.BOARD.read_text(encoding="utf-8") == grafana_board.text()


def test_every_metric_on_the_board_exists() -> None:
    named = {
        name
        for panel in grafana_board.panels(grafana_board.board())
        for t in panel["targets"]
        for name in named_in(t["expr"])
    }
    assert len(named) > 20
    assert named <= series()


def test_the_board_shows_what_operators_steer_by() -> None:
    titles = " ".join(panel["title"] for panel in grafana_board.panels(grafana_board.board())).lower()
    for essential in ("tier", "targets met", "headroom", "batch lines", "slack", "preemptions", "prediction"):
        assert essential in titles


def test_every_metric_in_an_alert_exists_and_every_alert_says_what_to_do() -> None:
    rules = loaded("prometheus/alerts.yml")["groups"][0]["rules"]
    named = {name for rule in rules for name in re.findall(r"\b(?:neaptide|process)_\w+", rule["expr"])}
    assert len(named) > 10
    assert named <= series() | OF_THE_PROCESS
    assert all({"summary", "action", "runbook_url"} == set(rule["annotations"]) for rule in rules)


def test_every_runbook_link_leads_to_a_heading() -> None:
    rules = loaded("prometheus/alerts.yml")["groups"][0]["rules"]
    page = (DEPLOY.parent / "docs" / "operations.md").read_text(encoding="utf-8")
    anchors = {name.lower().replace(" ", "-") for name in re.findall(r"^#+ (.+)$", page, re.MULTILINE)}
    for rule in rules:
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (path, anchor) == ("docs/operations.md", rule["alert"].lower())
        assert anchor in anchors


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_promtool_takes_rules_and_configuration() -> None:
    done = subprocess.run(
        ["promtool", "check", "config", "prometheus/prometheus.yml"], cwd=DEPLOY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_compose_file_names_what_is_there() -> None:
    compose = loaded("compose.yaml")
    services = compose["services"]
    assert set(services) == {"neaptide", "prometheus", "grafana"}
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"], volume
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert ":latest" not in service.get("image", "")
    build = services["neaptide"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).exists()


def test_the_parts_find_each_other() -> None:
    (scrape,) = loaded("prometheus/prometheus.yml")["scrape_configs"]
    assert scrape["static_configs"][0]["targets"] == ["neaptide:8000"]
    (source,) = loaded("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["type"] == grafana_board.SOURCE["type"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = loaded("grafana/provisioning/dashboards/neaptide.yml")["providers"]
    mounts = [volume.split(":")[1] for volume in loaded("compose.yaml")["services"]["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounts


@pytest.mark.parametrize(
    ("host", "is_answered"),
    [
        ("neaptide:8000", True),  # as Prometheus asks
        ("127.0.0.1:8000", True),  # as the health check does, and people
        ("localhost:8000", True),
        ("rebound.example:8000", False),
    ],
)
def test_the_composed_server_answers_to_its_names_alone(host: str, is_answered: bool) -> None:
    """Without keys a web page could reach the port on loopback by a name of its own."""
    said = loaded("compose.yaml")["services"]["neaptide"]["environment"]["NEAPTIDE_ALLOWED_HOSTS"]
    found = re.fullmatch(r"\$\{NEAPTIDE_ALLOWED_HOSTS:-(.+)\}", said)
    assert found is not None
    hosts = HostFilter.of_settings(split_list(found[1]), bound_to="0.0.0.0", keys_required=False)
    assert (hosts is None or hosts.admits(host)) is is_answered


def test_the_image_sets_settings_that_there_are() -> None:
    texts = (DEPLOY / "Dockerfile").read_text() + (DEPLOY / "compose.yaml").read_text()
    names = {name.lower() for name in re.findall(r"\bNEAPTIDE_([A-Z_]+)", texts)}
    assert names == {"host", "port", "data_dir", "api_key", "allowed_hosts"}
    assert names <= set(OPTIONS)


def test_the_image_runs_as_an_ordinary_user_and_copies_what_is_there() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    # By number: Kubernetes' runAsNonRoot refuses an image that names its user.
    assert lines.index("USER 10001:10001") < lines.index('ENTRYPOINT ["neaptide", "serve"]')
    assert (DEPLOY.parent / "requirements.lock").exists()


@pytest.mark.skipif(shutil.which("docker") is None, reason="needs the docker command")
def test_docker_compose_takes_the_file() -> None:
    version = subprocess.run(["docker", "compose", "version"], capture_output=True)
    if version.returncode != 0:
        pytest.skip("needs docker compose")
    done = subprocess.run(["docker", "compose", "config", "--quiet"], cwd=DEPLOY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
