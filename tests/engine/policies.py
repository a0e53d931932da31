"""Policies made for tests, named as a user names one of his own: ``tests.engine.policies:Name``."""

from typing import ClassVar

from neaptide.policy import RowKey, TokenFile, VllmV1Fcfs


def by_tokens(tokens: TokenFile, row: int) -> bytes:
    return tokens.sort_key(row)


class Sorted(VllmV1Fcfs):
    """Rows of a job run in the order of their token ids."""

    row_key: ClassVar[RowKey | None] = staticmethod(by_tokens)


class PublishesLate(VllmV1Fcfs):
    """Blocks are found in the cache after the step that computes them, not in it."""

    publishes_when_planned: ClassVar[bool] = False
    publishes_decodes_when_planned: ClassVar[bool] = False


class Planned(VllmV1Fcfs):
    """The offline pool runs in a planned order."""

    planned_order: ClassVar[str | None] = "fcfs"


SORTED = "tests.engine.policies:Sorted"
PUBLISHES_LATE = "tests.engine.policies:PublishesLate"
PLANNED = "tests.engine.policies:Planned"
