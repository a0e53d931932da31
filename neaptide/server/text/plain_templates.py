"""Tells chat templates whose work cannot exceed their input by much from templates that might do anything.

Most templates loop once over the messages and join texts. Their syntax tree shows it, so they are rendered in the
server's own process, without a way to another one. Whatever is not known to be harmless counts as harmful.
"""

from collections.abc import Iterator

from jinja2 import nodes

MAX_CHARS = 1 << 16
"""Longest template that is looked at."""
_NODES = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Assign, nodes.Macro, nodes.ExprStmt),
    *(nodes.Continue, nodes.Break, nodes.Name, nodes.NSRef, nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Const),
    *(nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Test, nodes.Filter, nodes.Call),
    *(nodes.Concat, nodes.Add, nodes.Sub, nodes.Mod, nodes.CondExpr, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair),
    nodes.Keyword,
)
_STEADY_FILTERS = frozenset(("trim", "length", "count", "lower", "safe", "first", "last", "int", "default", "d"))
_GROWING_FILTERS = frozenset(
    (
        *("upper", "capitalize", "title", "tojson", "string", "list", "items", "join", "map", "replace", "dictsort"),
        *("selectattr", "rejectattr", "select", "reject"),
    )
)
"""Filters whose result may be longer than what they take: applied to each other, they may grow without limit."""
_FUNCTIONS = frozenset(("raise_exception", "strftime_now", "namespace", "dict"))
_METHODS = frozenset(("strip", "lstrip", "rstrip", "split", "startswith", "endswith", "items", "keys", "values", "get"))
_LITERALS = (nodes.List, nodes.Tuple, nodes.Dict)


def is_plain(tree: nodes.Template, num_chars: int) -> bool:
    """Whether rendering takes time and memory in proportion to the input.

    Args:
        tree: of the template.
        num_chars: length of its source.
    """
    if num_chars > MAX_CHARS or not all(type(node) in _NODES for node in _all(tree)):
        return False
    macros = {macro.name for macro in tree.find_all(nodes.Macro)}
    return (
        all(_is_filter(node) for node in tree.find_all(nodes.Filter))
        and all(_is_call(node, macros) for node in tree.find_all(nodes.Call))
        and all(_is_remainder(node) for node in tree.find_all(nodes.Mod))
        and not any(_calls(macro, macros) for macro in tree.find_all(nodes.Macro))
        and not any(_is_compound(node, macros) for node in _all(tree))
        and _loops_are_flat(tree, frozenset())
        and not _feeds_back(tree)
    )


def _all(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in node.iter_child_nodes():
        yield from _all(child)


def _is_filter(node: nodes.Filter) -> bool:
    arguments = [*node.args, *(keyword.value for keyword in node.kwargs)]
    is_known = node.name in _STEADY_FILTERS or node.name in _GROWING_FILTERS
    return is_known and (node.name in ("default", "d") or all(map(_is_small, arguments)))


def _is_small(node: nodes.Node) -> bool:
    """Whether an argument is a short constant: a text or a number from the input could be large."""
    if not isinstance(node, nodes.Const):
        return False
    return len(node.value) <= 64 if isinstance(node.value, str) else abs(node.value or 0) <= 64


def _is_call(node: nodes.Call, macros: set[str]) -> bool:
    called = node.node
    if node.dyn_args is not None or node.dyn_kwargs is not None:
        return False
    if isinstance(called, nodes.Name):
        return called.name in _FUNCTIONS or called.name in macros
    return isinstance(called, nodes.Getattr) and called.attr in _METHODS and all(map(_is_small, node.args))


def _is_remainder(node: nodes.Mod) -> bool:
    """Whether it is arithmetic on a loop's counter: on a text, the operator formats, to any width."""
    left = node.left
    return isinstance(left, nodes.Getattr) and isinstance(left.node, nodes.Name) and left.node.name == "loop"


def _calls(macro: nodes.Macro, macros: set[str]) -> bool:
    """Whether a macro calls macros, which may go on for ever."""
    return any(isinstance(call.node, nodes.Name) and call.node.name in macros for call in macro.find_all(nodes.Call))


def _loops_are_flat(node: nodes.Node, targets: frozenset[str]) -> bool:
    """Whether each inner loop goes over a part of what the outer one goes over.

    Args:
        targets: names of the current item of the outer loops; empty outside loops.
    """
    if isinstance(node, nodes.For):
        if node.recursive or (targets and targets.isdisjoint(_names(node.iter))):
            return False
        targets |= _names(node.target)
    for child in node.iter_child_nodes():
        if not _loops_are_flat(child, targets):
            return False
        if isinstance(child, nodes.Assign) and targets & _names(child.node):
            targets |= _names(child.target)  # A part of the item, under another name.
    return True


def _names(node: nodes.Node) -> set[str]:
    return {found.name for found in _all(node) if isinstance(found, nodes.Name)}


def _is_compound(node: nodes.Node, macros: set[str]) -> bool:
    """Whether something that may grow is applied to something that has grown."""
    is_macro = isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name in macros
    is_list = isinstance(node, _LITERALS) or (isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr))
    if not (is_macro or is_list or (isinstance(node, nodes.Filter) and node.name in _GROWING_FILTERS)):
        return False
    inner = (found for child in node.iter_child_nodes() for found in _all(child))
    return any(
        isinstance(found, nodes.Concat)
        or (isinstance(found, nodes.Filter) and found.name in _GROWING_FILTERS)
        or (isinstance(found, nodes.Call) and isinstance(found.node, nodes.Name) and found.node.name in macros)
        for found in inner
    )


def _feeds_back(tree: nodes.Template) -> bool:
    """Whether a variable may grow with each assignment by more than is added to it."""
    assigns = list(tree.find_all(nodes.Assign))
    targets = [found for assign in assigns for found in _all(assign.target)]
    changed = {found.name for found in targets if isinstance(found, nodes.Name | nodes.NSRef)}
    return any(_feeds(assign.node, changed) for assign in assigns)


def _feeds(value: nodes.Node, changed: set[str]) -> bool:
    found = list(_all(value))
    count = sum(isinstance(node, nodes.Name) and node.name in changed for node in found)
    grows = any(
        isinstance(node, (nodes.Concat, *_LITERALS))
        or (isinstance(node, nodes.Filter) and node.name in _GROWING_FILTERS)
        for node in found
    )
    return count > 1 or (count == 1 and grows)
