"""What tests of executors share."""

from tests.executors.conftest import gqa

__all__ = ["gqa"]
