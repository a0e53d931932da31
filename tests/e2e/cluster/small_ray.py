"""``serve run MANIFEST`` on a Ray of its own, small: ``python small_ray.py MANIFEST``.

Ray's own dashboard has a dozen processes, which a test's machine has better use for.
"""

import sys

import ray
from ray.serve.scripts import cli

OBJECT_STORE_BYTES = 80 * 2**20
"""Serve's messages are small; by default it would be a third of the memory."""

if __name__ == "__main__":
    ray.init(
        address="local",
        namespace="serve",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
    )
    cli(["run", sys.argv[1]])
