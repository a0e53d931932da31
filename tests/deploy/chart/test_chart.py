"""The Helm chart: rendered by Helm's own library, checked against Kubernetes' schemas, and what its pods rely on.

No cluster has run the chart. ``test_played_pod.py`` plays what a kubelet does over the real processes.
"""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from neaptide.server.settings import OPTIONS
from tests.deploy.chart.custom_resources import CUSTOM_RESOURCES
from tests.deploy.test_deploy import DEPLOY

pytest.importorskip("helm_python", reason="needs helm-python-sdk")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
import jsonschema  # noqa: E402  kubernetes-validate brings it

CHART = DEPLOY / "helm" / "neaptide"
KUBERNETES = "1.37"
SETS = ("single", "gpu", "cluster")
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two servers without a database": ({"servers": 2, "gateway": {"enabled": True}}, "existingSecret"),
    "two servers without a gateway": ({"servers": 2, "store": {"existingSecret": "s", "blobs": "s3://b"}}, "enabled"),
    "a value that there is not": ({"replicaCount": 2}, "replicaCount"),
    "a setting that has a value of its own": ({"config": {"port": 9000}}, "port"),
    "a key file from two places": ({"config": {"api_key_file": "/keys.toml"}}, "api_key_file"),
    "a key file outside its directory": ({"apiKeys": {"file": {"key": "../keys.toml"}}}, "key"),
    "a grace period that is too short": ({"drain": {"marginS": 5}}, "marginS"),
    "a pool without a picker": ({"inferencePool": {"enabled": True}}, "endpointPicker"),
}
NUMBERS = {"config": {"max_model_len": 1_048_576, "late_price_s": 1.5, "cpu_kernels": False}}

Resources = dict[tuple[str, str], dict[str, Any]]
"""By kind and name."""


def values_of(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text())
    return values


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """What Helm says of all value sets, of those that it must refuse, of numbers, and of the chart."""
    asked = [*map(values_of, SETS), *(values for values, _ in REFUSED.values()), NUMBERS]
    done = subprocess.run(
        [sys.executable, "-m", "tests.deploy.chart.render"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def resources(said: dict[str, Any], name: str) -> Resources:
    """What an installation creates."""
    return created(said["answers"][SETS.index(name)])


def created(answer: dict[str, Any]) -> Resources:
    assert "manifests" in answer, answer
    texts = [text for path, text in answer["manifests"].items() if path.endswith(".yaml")]
    found = [one for text in texts for one in yaml.safe_load_all(text) if one]
    named = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(named) == len(found), "two resources of one name"
    return named


def pod_of(found: Resources, kind: str, name: str) -> dict[str, Any]:
    spec: dict[str, Any] = found[kind, name]["spec"]["template"]["spec"]
    return spec


def pods(found: Resources) -> list[dict[str, Any]]:
    return [one["spec"]["template"]["spec"] for one in found.values() if "template" in one["spec"]]


def environment(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    found = {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}
    assert len(found) == len(container["env"]), "a variable occurs twice"
    return found


def complaint(document: dict[str, Any]) -> str | None:
    """What is wrong with a resource, by its schema; None if nothing is."""
    try:
        if document["kind"] in CUSTOM_RESOURCES:
            jsonschema.validate(document, CUSTOM_RESOURCES[document["kind"]])
        else:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except jsonschema.ValidationError as error:
        return f"{document['kind']} {document['metadata'].get('name')}: {error.message}"
    return None


def test_helm_finds_no_fault_in_the_chart(said: dict[str, Any]) -> None:
    assert said["lint"]["errors"] == []
    texts = [message["error"] for message in said["lint"]["messages"] if message["severity"] > 1]
    assert texts == []


@pytest.mark.parametrize("name", SETS)
def test_what_is_rendered_follows_the_schemas(said: dict[str, Any], name: str) -> None:
    found = resources(said, name)
    assert [text for one in found.values() if (text := complaint(one)) is not None] == []


def test_the_largest_installation_has_everything(said: dict[str, Any]) -> None:
    kinds = {kind for kind, _ in resources(said, "cluster")}
    assert kinds == {
        "StatefulSet", "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "ScaledObject",
        "ServiceMonitor", "PrometheusRule", "InferencePool",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("StatefulSet", ("spec", "template", "spec", "terminationGracePeriod"), 30),
        ("StatefulSet", ("spec", "replicas"), "three"),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "exprs"), "up"),
        ("ScaledObject", ("spec", "triggers", 0, "metadata", "threshold"), 1),
        ("InferencePool", ("spec", "targetPortNumber"), 8000),
    ],
)
def test_the_schemas_refuse_what_is_wrong(said: dict[str, Any], kind: str, path: tuple[Any, ...], value: Any) -> None:
    document = copy.deepcopy(next(one for (of, _), one in resources(said, "cluster").items() if of == kind))
    inner: Any = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert complaint(document) is not None


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_make_no_sense_are_refused(said: dict[str, Any], name: str) -> None:
    answer = said["answers"][len(SETS) + list(REFUSED).index(name)]
    assert REFUSED[name][1] in answer["complaint"]


@pytest.mark.parametrize("name", SETS)
def test_every_variable_is_a_setting_or_one_of_the_hub(said: dict[str, Any], name: str) -> None:
    for pod in pods(resources(said, name)):
        ours = {one.removeprefix("NEAPTIDE_").lower() for one in environment(pod) if one.startswith("NEAPTIDE_")}
        assert ours <= set(OPTIONS)
        assert {one for one in environment(pod) if not one.startswith("NEAPTIDE_")} <= {
            "HF_HOME", "HF_TOKEN", "HF_ENDPOINT"
        }  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_a_pod_may_do_no_more_than_it_needs(said: dict[str, Any], name: str) -> None:
    for pod in pods(resources(said, name)):
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["automountServiceAccountToken"] is False
        # Variables of a service of the name neaptide would be taken for settings.
        assert pod["enableServiceLinks"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("name", SETS)
def test_all_that_a_pod_writes_to_is_a_volume(said: dict[str, Any], name: str) -> None:
    found = resources(said, name)
    for one in found.values():
        if "template" not in one["spec"]:
            continue
        (container,) = one["spec"]["template"]["spec"]["containers"]
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        own = environment(one["spec"]["template"]["spec"])
        assert {"/data", "/tmp", own["HF_HOME"]} <= set(mounted)
        # The volume's root belongs to root.
        assert Path(own["NEAPTIDE_DATA_DIR"]).parent == Path("/data")
        claimed = {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"] for volume in one["spec"]["template"]["spec"]["volumes"]}
        assert not claimed & volumes
        assert set(mounted.values()) == claimed | volumes


@pytest.mark.parametrize("name", SETS)
def test_a_pod_has_time_to_drain(said: dict[str, Any], name: str) -> None:
    for pod in pods(resources(said, name)):
        own = environment(pod)
        (container,) = pod["containers"]
        (command, pause_s) = container["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "sleep"
        longest_s = max(float(own["NEAPTIDE_DRAIN_MIN_S"]), float(own["NEAPTIDE_DRAIN_TIMEOUT_S"]))
        assert pod["terminationGracePeriodSeconds"] >= float(pause_s) + longest_s + 20


@pytest.mark.parametrize("name", SETS)
def test_probes_ask_the_engine_before_traffic_and_the_process_before_a_restart(said: dict[str, Any], name: str) -> None:
    for pod in pods(resources(said, name)):
        (container,) = pod["containers"]
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
        # /ready is 503 while an engine is replaced: a liveness probe of it would kill what repairs the engine.
        assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
        startup = container["startupProbe"]
        # A gateway is there before its servers are.
        assert startup["httpGet"]["path"] == {"server": "/ready", "gateway": "/livez"}[container["name"]]
        assert startup["periodSeconds"] * startup["failureThreshold"] == {"gpu": 3600}.get(name, 1800)


def test_the_gateways_find_the_servers_and_clients_the_gateways(said: dict[str, Any]) -> None:
    found = resources(said, "cluster")
    (gateway,) = pod_of(found, "Deployment", "chat-neaptide-gateway")["containers"]
    assert gateway["args"] == [
        "gateway", "/models/llama-3.1-8b", "--servers-dns", "chat-neaptide-server.models.svc:8000"
    ]  # fmt: skip
    servers = found["Service", "chat-neaptide-server"]["spec"]
    assert (servers["clusterIP"], servers["publishNotReadyAddresses"]) == ("None", True)
    labels = found["StatefulSet", "chat-neaptide-server"]["spec"]["template"]["metadata"]["labels"]
    assert servers["selector"].items() <= labels.items()
    front = found["Service", "chat-neaptide"]["spec"]["selector"]
    labels = found["Deployment", "chat-neaptide-gateway"]["spec"]["template"]["metadata"]["labels"]
    assert front.items() <= labels.items()


def test_servers_share_a_database_that_the_gateways_do_not_need(said: dict[str, Any]) -> None:
    found = resources(said, "cluster")
    server = environment(pod_of(found, "StatefulSet", "chat-neaptide-server"))
    assert server["NEAPTIDE_STORE"] == {"secretKeyRef": {"name": "neaptide-store", "key": "url"}}
    assert server["NEAPTIDE_BLOBS"] == "s3://neaptide/blobs"
    assert "NEAPTIDE_STORE" not in environment(pod_of(found, "Deployment", "chat-neaptide-gateway"))


def test_keys_come_from_a_secret(said: dict[str, Any]) -> None:
    own = environment(pod_of(resources(said, "single"), "StatefulSet", "chat-neaptide-server"))
    assert own["NEAPTIDE_API_KEY"] == {"secretKeyRef": {"name": "neaptide-keys", "key": "api-keys"}}
    assert "NEAPTIDE_API_KEY_FILE" not in own


def test_a_key_file_is_mounted_so_that_a_changed_secret_reaches_servers_and_gateways(said: dict[str, Any]) -> None:
    """A kubelet replaces the files of a mounted directory, but never a file that is mounted alone, with subPath."""
    found = resources(said, "cluster")
    for kind, name in (("StatefulSet", "chat-neaptide-server"), ("Deployment", "chat-neaptide-gateway")):
        pod = pod_of(found, kind, name)
        assert environment(pod)["NEAPTIDE_API_KEY_FILE"] == "/etc/neaptide/keys/keys.toml"
        assert "NEAPTIDE_API_KEY" not in environment(pod)
        (mount,) = (one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "api-keys")
        assert mount == {"name": "api-keys", "mountPath": "/etc/neaptide/keys", "readOnly": True}
        (volume,) = (one for one in pod["volumes"] if one["name"] == "api-keys")
        assert volume["secret"] == {
            "secretName": "neaptide-keys",
            "defaultMode": 0o440,
            "items": [{"key": "keys.toml", "path": "keys.toml"}],
        }


def test_numbers_reach_the_server_as_they_were_written(said: dict[str, Any]) -> None:
    """Helm reads them as floats, whose text for a million is 1e+06."""
    own = environment(pod_of(created(said["answers"][-1]), "StatefulSet", "chat-neaptide-server"))
    found = [own[f"NEAPTIDE_{name.upper()}"] for name in NUMBERS["config"]]
    assert found == ["1048576", "1.5", "false"]


def test_no_secret_stands_in_the_manifests(said: dict[str, Any]) -> None:
    for name in SETS:
        for pod in pods(resources(said, name)):
            secret = {one for one in environment(pod) if re.search("(KEY|TOKEN|STORE)$", one)}
            assert all("secretKeyRef" in environment(pod)[one] for one in secret)


def test_a_gpu_is_asked_for(said: dict[str, Any]) -> None:
    (server,) = pod_of(resources(said, "gpu"), "StatefulSet", "chat-neaptide-server")["containers"]
    assert server["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "1"}


def test_one_server_is_scraped_once(said: dict[str, Any]) -> None:
    """Its pod stands behind two services."""
    found = resources(said, "single")
    wanted = found["ServiceMonitor", "chat-neaptide-server"]["spec"]["selector"]["matchLabels"]
    services = [one for (kind, _), one in found.items() if kind == "Service"]
    assert len(services) == 2
    assert [one["metadata"]["name"] for one in services if wanted.items() <= one["metadata"]["labels"].items()] == [
        "chat-neaptide-server"
    ]


@pytest.mark.parametrize("name", ["single", "cluster"])
def test_the_rules_of_the_chart_are_those_of_prometheus(said: dict[str, Any], name: str) -> None:
    shipped = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    base = values_of(name)["prometheusRule"].get("runbookBase", "")
    for rule in shipped["groups"][0]["rules"]:
        rule["annotations"]["runbook_url"] = base + rule["annotations"]["runbook_url"]
    assert resources(said, name)["PrometheusRule", "chat-neaptide"]["spec"] == shipped
    assert (CHART / "files" / "alerts.yml").is_symlink(), "a copy would grow old"


def test_scaling_follows_a_series_of_the_gateway(said: dict[str, Any]) -> None:
    found = resources(said, "cluster")
    scaled = found["ScaledObject", "chat-neaptide-server"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == "chat-neaptide-server"
    assert "replicas" not in found["StatefulSet", "chat-neaptide-server"]["spec"], "each upgrade would undo the scaling"
    (trigger,) = scaled["triggers"]
    assert trigger["metadata"]["query"] == (
        'max(neaptide_cluster_replicas_wanted{namespace="models",service="chat-neaptide"})'
    )
    assert trigger["metadata"]["ignoreNullValues"] == "false", "a gateway that starts would scale the servers down"


def test_servers_hear_gateways_and_prometheus_alone(said: dict[str, Any]) -> None:
    found = resources(said, "cluster")
    policy = found["NetworkPolicy", "chat-neaptide-server"]["spec"]
    peers = [peer for rule in policy["ingress"] for peer in rule["from"]]
    assert peers[0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    assert peers[1:] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    # Anybody may call the gateways.
    assert found["NetworkPolicy", "chat-neaptide-gateway"]["spec"]["ingress"][0] == {"ports": [{"port": "http"}]}
