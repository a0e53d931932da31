"""Resolves references within a schema."""

import json
from typing import Any


class References:
    """References of one document.

    Args:
        root: the whole schema.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._is_one_resource = '"$id"' not in json.dumps(root)
        """Whether no part has its own base, so that pointers start at the root."""

    def target(self, reference: Any) -> Any:
        """The schema that a pointer into this document names; True, which accepts everything, for all other
        references."""
        if not isinstance(reference, str) or not self._is_one_resource:
            return True
        if reference != "#" and not reference.startswith("#/"):
            return True
        node = self._root
        for part in reference[2:].split("/") if reference != "#" else ():
            if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
                node = node[int(part)]
            elif not isinstance(node, dict) or "%" in part or "~" in part:
                return True
            else:
                node = node.get(part, True)
        return node
