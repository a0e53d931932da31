"""Plays a pod of the chart over real processes: its command, variables, probes and stop, as a kubelet would.

What a machine without a cluster has no counterpart for is left out: the network between pods, the file system of the
container, its user and its limits.
"""

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.patience import until_here


def get(host: str, port: int, path: str, timeout_s: float) -> int:
    """Status of a reply on a new connection; 0 without one."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


class Pod:
    """One pod with one container, from ``start`` to ``stop``; it may be started again.

    Args:
        spec: the pod's specification, as the chart renders it.
        own: what differs on this machine: variables in place of the rendered ones, those of secrets among them.
    """

    def __init__(self, spec: dict[str, Any], directory: Path, port: int, own: Mapping[str, str], *more: str) -> None:
        (self._container,) = spec["containers"]
        self.grace_s: float = spec["terminationGracePeriodSeconds"]
        self.port = port
        rendered = {one["name"]: one["value"] for one in self._container["env"] if "value" in one}
        of_secrets = {one["name"] for one in self._container["env"] if "valueFrom" in one}
        assert of_secrets <= own.keys(), f"secrets without a value: {of_secrets - own.keys()}"
        self._environment = os.environ | rendered | dict(own) | {"NEAPTIDE_PORT": str(port)}
        self._environment["NEAPTIDE_HOST"] = "127.0.0.1"
        self._more = more
        self._log_path = directory / "container.log"
        directory.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._watching = threading.Event()
        self._kubelet: threading.Thread | None = None
        self.is_ready = False
        self.liveness: list[int] = []
        """Statuses that the liveness probe got, since the startup probe succeeded."""
        self.num_restarts = 0
        """How often a kubelet would have killed the container for its liveness."""

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None
        return self._process

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    def __enter__(self) -> "Pod":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self.stop()

    # ---- the kubelet's work ----

    def start(self) -> None:
        """Returns when the pod is ready."""
        command = [sys.executable, "-m", *self._container["command"], *self._container["args"], *self._more]
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self._environment, stdin=subprocess.DEVNULL
            )
        self._watching.clear()
        self._kubelet = threading.Thread(target=self._probe_on)
        self._kubelet.start()
        until_here(lambda: self.is_ready or self.process.poll() is not None)
        assert self.is_ready, f"the container ended:\n{self.log[-3000:]}"

    def stop(self) -> float:
        """Pause, signal, and a kill at the end of the grace period; returns the time of the signal. Raises
        AssertionError if the kill was needed."""
        begun_s = time.monotonic()
        subprocess.run(self._container["lifecycle"]["preStop"]["exec"]["command"], check=True)
        signal_s = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(self.grace_s - (signal_s - begun_s))
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"killed at the end of its grace period:\n{self.log[-3000:]}") from None
        finally:
            self._watching.set()
            assert self._kubelet is not None
            self._kubelet.join()
            self.is_ready = False
        return signal_s

    def ask(self, probe: str) -> int:
        """Status that a probe gets now; 0 for none in its time."""
        what = self._container[probe]
        return get("127.0.0.1", self.port, what["httpGet"]["path"], what["timeoutSeconds"])

    def _probe_on(self) -> None:
        if "startupProbe" in self._container:
            while self.ask("startupProbe") != 200:
                # More often than a kubelet, so that less time passes.
                if self._watching.wait(0.2) or self.process.poll() is not None:
                    return
        num_dead = 0
        while not self._watching.is_set() and self.process.poll() is None:
            self.is_ready = self.ask("readinessProbe") == 200
            self.liveness.append(self.ask("livenessProbe"))
            num_dead = 0 if self.liveness[-1] == 200 else num_dead + 1
            if num_dead >= self._container["livenessProbe"]["failureThreshold"]:
                self.num_restarts += 1
                num_dead = 0
            self._watching.wait(0.2)
