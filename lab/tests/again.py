"""Tests of the package's own policies, run again under those of the laboratory."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import pytest


def again(test: Callable[..., Any], argument: str, values: Sequence[Any], **only_full: Any) -> Callable[..., Any]:
    """The test with these values of one of its parameters; its other marks stay.

    Args:
        argument: as in the test's ``parametrize``; ``a,b`` where that names two.
        only_full: a value of another parameter that the long form alone tries: ``depth=0``.
    """

    @wraps(test)
    def repeated(*args: Any, **kwargs: Any) -> Any:
        return test(*args, **kwargs)

    before: list[pytest.Mark] = test.pytestmark  # type: ignore[attr-defined]
    marks = [_with_full(mark, only_full) for mark in before if not _is_of(mark, argument)]
    assert len(marks) < len(before), f"{test.__name__} has no parameter {argument}"
    assert all(any(_is_of(mark, name) for mark in marks) for name in only_full)
    repeated.pytestmark = [*marks, pytest.mark.parametrize(argument, values).mark]  # type: ignore[attr-defined]
    return repeated


def _is_of(mark: pytest.Mark, argument: str) -> bool:
    if mark.name != "parametrize":
        return False
    names = mark.args[0]
    return argument == (names if isinstance(names, str) else ",".join(names))


def _with_full(mark: pytest.Mark, only_full: dict[str, Any]) -> pytest.Mark:
    """The mark with those values of its parameter marked as ``full``."""
    if mark.name != "parametrize" or mark.args[0] not in only_full:
        return mark
    name, values = mark.args
    assert only_full[name] in values, f"{name} is never {only_full[name]}"
    marked = [pytest.param(v, marks=pytest.mark.full) if v == only_full[name] else v for v in values]
    return pytest.mark.parametrize(name, marked).mark
