"""Ray Serve on this machine: two replicas as actors, behind its proxy. For tests where Ray is installed."""

import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.cluster.e2e.machine import RunningCluster

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (pip install neaptide[cluster])")
MANIFEST = Path(__file__).parents[4] / "deploy" / "ray" / "serve.yaml"
RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Sockets below it must have short names.
    "RAY_TMPDIR": "/tmp",
    # On a machine that others use its processes may take minutes to come up: longer than it waits for them by default.
    "RAY_gcs_server_port_wait_time_s": "280",
    "RAY_raylet_start_wait_time_s": "280",
    "RAY_agent_register_timeout_ms": "280000",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "280",
}


def local_manifest(port: int, arguments: dict[str, Any], scaling: dict[str, Any] | None) -> dict[str, Any]:
    """``deploy/ray/serve.yaml`` for a machine of any size; with an ``autoscaling_config`` of its replicas, or as many
    as stand there."""
    manifest: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())
    manifest["http_options"] = {"host": "127.0.0.1", "port": port}
    (application,) = manifest["applications"]
    application["args"] = application["args"] | arguments
    for deployment in application["deployments"]:
        deployment["ray_actor_options"] = {"num_cpus": 0}
        if deployment["name"] == "replica" and scaling is not None:
            del deployment["num_replicas"]
            deployment["autoscaling_config"] = scaling
    return manifest


class RayCluster(RunningCluster):
    """A Ray of its own, which ends with the context."""

    def __init__(
        self,
        directory: Path,
        arguments: dict[str, Any],
        env: dict[str, str],
        scaling: dict[str, Any] | None = None,
    ) -> None:
        """``arguments``: settings by name, beside those of the manifest. ``scaling``: as in ``local_manifest``."""
        super().__init__(directory, env=env, replicas="2" if scaling is None else str(scaling["min_replicas"]))
        directory.mkdir(parents=True, exist_ok=True)
        self._manifest = directory / "serve.yaml"
        self._arguments = arguments | {"data_dir": str(self.data_dir), "blobs": (directory / "blobs").as_uri()}
        self._scaling = scaling
        self._write_manifest()
        self._command = [sys.executable, str(Path(__file__).with_name("small_ray.py")), str(self._manifest)]
        self._env |= RAY_VARIABLES

    def _write_manifest(self) -> None:
        self._manifest.write_text(yaml.safe_dump(local_manifest(self.port, self._arguments, self._scaling)))

    def deploy(self, **changes: Any) -> None:
        """The same application with other settings, as by ``serve deploy``."""
        self._arguments |= changes
        self._write_manifest()
        self.process.send_signal(signal.SIGUSR2)

    def request_log(self, name: str = "replica-1") -> list[dict[str, Any]]:
        return super().request_log(name[name.index("replica-") :])  # its node's name stands before

    def replica(self, name: str) -> psutil.Process:
        port = next(one["url"] for one in self.shown() if one["name"] == name).rpartition(":")[2]
        for process in psutil.process_iter():
            try:
                if any(str(one.laddr.port) == port for one in process.net_connections("tcp") if one.status == "LISTEN"):
                    return process
            except psutil.Error:
                continue
        raise AssertionError(f"no process listens for {name}")

    def __exit__(self, *exc: Any) -> None:
        # Ctrl-C is what ends ``serve run`` in good order.
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGINT)
        super().__exit__(*exc)
