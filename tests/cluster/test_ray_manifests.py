"""What stands in ``deploy/ray`` names what there is. Nothing here runs it."""

import ast
import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from neaptide.server.settings import OPTIONS
from neaptide.server.settings_sources import load_settings
from tools.syntax import syntax_tree

REPOSITORY = Path(__file__).parents[2]
RAY = REPOSITORY / "deploy" / "ray"
HAS_RAY = importlib.util.find_spec("ray") is not None


def loaded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((RAY / name).read_text())
    return found


def application() -> dict[str, Any]:
    (found,) = loaded("serve.yaml")["applications"]
    return dict(found)


def root() -> ast.Module:
    module, _, _ = application()["import_path"].partition(":")
    return syntax_tree((REPOSITORY / f"{module.replace('.', '/')}.py").read_text())


def test_the_application_is_one_of_ours() -> None:
    _, _, name = application()["import_path"].partition(":")
    functions = {node.name: node for node in root().body if isinstance(node, ast.FunctionDef)}
    assert [argument.arg for argument in functions[name].args.args] == ["arguments"]


def test_its_deployments_are_those_that_it_has() -> None:
    """Ray refuses a manifest that names another one."""
    names = {
        keyword.value.value
        for node in ast.walk(root())
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "name" and isinstance(keyword.value, ast.Constant)
    }
    assert {deployment["name"] for deployment in application()["deployments"]} == names == {"replica", "gateway"}


def test_its_arguments_are_settings() -> None:
    arguments = application()["args"]
    assert set(arguments) <= set(OPTIONS)
    settings = load_settings({**arguments, "store": "postgresql://neaptide@db/neaptide"}, environ={})
    assert (settings.host, settings.blobs) == ("0.0.0.0", "s3://neaptide/blobs")


def test_on_kubernetes_it_is_the_same_application() -> None:
    service = loaded("rayservice.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == loaded("serve.yaml")


def test_its_nodes_have_what_the_application_asks_for() -> None:
    spec = loaded("rayservice.yaml")["spec"]["rayClusterConfig"]
    (group,) = spec["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    limits, asked = container["resources"]["limits"], application()["deployments"]
    assert group["replicas"] >= next(one["num_replicas"] for one in asked if one["name"] == "replica")
    assert int(limits["cpu"]) >= sum(one["ray_actor_options"]["num_cpus"] for one in asked)
    assert int(limits["nvidia.com/gpu"]) == asked[0]["ray_actor_options"]["num_gpus"]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {application()["args"]["data_dir"]}
    # Its services would make variables that look like settings.
    for template in (spec["headGroupSpec"]["template"], group["template"]):
        assert template["spec"]["enableServiceLinks"] is False


def containers() -> list[dict[str, Any]]:
    """Of the head and of every kind of worker."""
    spec = loaded("rayservice.yaml")["spec"]["rayClusterConfig"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


def test_any_node_can_read_the_settings() -> None:
    """Serve builds the application on whichever it likes, and what was not said there is refused."""
    for container in containers():
        variables = {variable["name"]: variable["valueFrom"]["secretKeyRef"]["key"] for variable in container["env"]}
        assert variables == {"NEAPTIDE_STORE": "store", "NEAPTIDE_API_KEY": "api-keys"}
    environment = {"NEAPTIDE_STORE": "postgresql://neaptide@db/neaptide", "NEAPTIDE_API_KEY": "key"}
    settings = load_settings(application()["args"], environ=environment)
    assert (settings.store, settings.blobs) == (environment["NEAPTIDE_STORE"], "s3://neaptide/blobs")


FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"serveConfigV2", "rayClusterConfig", "serveService"},
    "cluster": {"headGroupSpec", "workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling", "autoscalerOptions"},
    "head": {"serviceType", "headService", "enableIngress", "rayStartParams", "template"},
    "worker": {"groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template"},
}
"""Of ``ray.io/v1``, as KubeRay's types have them. Kubernetes drops others without a word."""


def test_its_fields_are_those_of_a_ray_service() -> None:
    service = loaded("rayservice.yaml")
    spec = service["spec"]
    cluster = spec["rayClusterConfig"]
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    parts = [("", service), ("spec", spec), ("cluster", cluster), ("head", head), *(("worker", one) for one in workers)]
    for name, part in parts:
        assert set(part) <= FIELDS[name], name
    for group in (head, *workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    for group in workers:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_the_ray_of_the_nodes_is_one_that_the_extra_admits() -> None:
    extra = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cluster"]
    version = loaded("rayservice.yaml")["spec"]["rayClusterConfig"]["rayVersion"]
    assert f"ray[serve]>={version.rpartition('.')[0]},<2.61" in extra


def test_ray_takes_the_manifest() -> None:
    # What warns when it is imported is Ray's own.
    serve = pytest.importorskip(
        "ray.serve.schema", reason="Ray is not installed (pip install neaptide[cluster])", exc_type=ImportError
    )
    schema = serve.ServeDeploySchema.model_validate(loaded("serve.yaml"))
    assert [one.import_path for one in schema.applications] == [application()["import_path"]]
