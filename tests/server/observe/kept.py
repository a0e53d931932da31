"""What a part of the server keeps in memory, by the objects of ours and their entries."""

import gc
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

OURS = ("neaptide.", "prometheus_client.")
CONTAINERS = (dict, list, tuple, set, frozenset, deque)


def kept(*roots: object) -> Counter[str]:
    """How many objects of each of our classes (and of the metrics library's) can be reached, and how many entries their
    attributes have in all."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    waiting: list[object] = list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        if isinstance(one, CONTAINERS):
            waiting += _entries(one)
        elif type(one).__module__.startswith(OURS):
            name = f"{type(one).__module__}.{type(one).__qualname__}"
            found[name] += 1
            for attribute, value in _attributes(one):
                if isinstance(value, (*CONTAINERS, bytes, bytearray, str)):
                    found[f"{name}.{attribute}"] += len(value)
                waiting.append(value)
        elif callable(one):
            waiting += [each for each in gc.get_referents(one) if type(each).__module__.startswith(OURS)]
    return found


def _entries(one: Any) -> Iterable[object]:
    return [*one.keys(), *one.values()] if isinstance(one, dict) else one


def _attributes(one: object) -> Iterable[tuple[str, Any]]:
    names = [*getattr(one, "__dict__", ())]
    for cls in type(one).__mro__:
        slots = getattr(cls, "__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [(name, getattr(one, name)) for name in names if not name.startswith("__") and hasattr(one, name)]
