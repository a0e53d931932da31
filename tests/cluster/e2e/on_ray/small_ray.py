"""``serve run MANIFEST`` on a Ray of its own, small: ``python small_ray.py MANIFEST``. SIGUSR2 deploys what the
manifest says by then.

Ray's own dashboard has a dozen processes, which a test's machine has better use for.
"""

import signal
import sys
from pathlib import Path

import ray
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema
from ray.serve.scripts import cli

OBJECT_STORE_BYTES = 80 * 2**20
"""Serve's messages are small; by default it would be a third of the memory."""


def deploy(*_: object) -> None:
    manifest = yaml.safe_load(Path(sys.argv[1]).read_text())
    serve.context._get_global_client().deploy_apps(ServeDeploySchema.model_validate(manifest))


if __name__ == "__main__":
    ray.init(
        address="local",
        namespace="serve",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
    )
    signal.signal(signal.SIGUSR2, deploy)
    cli(["run", sys.argv[1]])
