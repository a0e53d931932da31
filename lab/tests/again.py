"""Tests of the package's own policies, run again under those of the laboratory."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import pytest


def again(test: Callable[..., Any], argument: str, values: Sequence[Any]) -> Callable[..., Any]:
    """The test with these values of one of its parameters; its other marks stay.

    Args:
        argument: as in the test's ``parametrize``; ``a,b`` where that names two.
    """

    @wraps(test)
    def repeated(*args: Any, **kwargs: Any) -> Any:
        return test(*args, **kwargs)

    marks = [mark for mark in test.pytestmark if not _is_of(mark, argument)]  # type: ignore[attr-defined]
    assert len(marks) < len(test.pytestmark), f"{test.__name__} has no parameter {argument}"  # type: ignore[attr-defined]
    repeated.pytestmark = [*marks, pytest.mark.parametrize(argument, values).mark]  # type: ignore[attr-defined]
    return repeated


def _is_of(mark: pytest.Mark, argument: str) -> bool:
    if mark.name != "parametrize":
        return False
    names = mark.args[0]
    return argument == (names if isinstance(names, str) else ",".join(names))
