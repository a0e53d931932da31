"""What tests of executors share, for those of policies that need one."""

from tests.executors.conftest import gqa

__all__ = ["gqa"]
