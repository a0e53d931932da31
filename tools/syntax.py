"""Syntax trees of Python sources."""

import ast
import gc


def syntax_tree(text: str) -> ast.Module:
    """The tree of a source. Raises SyntaxError.

    No garbage is collected meanwhile. It may run Python code, and so another thread that makes a tree too. In CPython
    3.11 both then share a counter, and one ends in a SystemError (CPython's issue 106905).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if was_enabled:
            gc.enable()
