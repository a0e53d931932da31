"""What references within a schema name."""

import json
from typing import Any


class References:
    """Of one document.

    Args:
        root: the whole schema.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._is_one_resource = '"$id"' not in json.dumps(root)
        """No part of it has a base of its own, so that a pointer starts at the root."""

    def target(self, reference: Any) -> Any:
        """What a pointer into this document names; True, which says nothing of a document, for all other references."""
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
