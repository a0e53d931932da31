"""Loads the cluster's storage if the settings ask for it."""

from importlib import import_module
from typing import TYPE_CHECKING

from neaptide.server.settings import Settings

if TYPE_CHECKING:
    from neaptide.server.batches.sharing import BatchSharing


def sharing_of(settings: Settings) -> "BatchSharing | None":
    """The shared storage; None for a server with its database and files in its data directory, which loads nothing of
    the cluster.

    Raises:
        StoreError: an address is invalid.
    """
    if settings.store is None:
        return None
    # By name: a static import would make the cluster part of every server.
    module = import_module("neaptide.cluster.sharing")
    found: BatchSharing | None = module.sharing_of(settings.store, settings.blobs, settings.chunk_lease_s)
    return found
