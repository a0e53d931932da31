"""How large the repository is, and how plainly it is written: ``make size``. It reports and caps nothing.

    python3 -m tools.size [--root DIR] [--list]

The serving closure is every module that a server may load, its child processes included: what ``neaptide.launch.serve``
imports, directly or not, and each module whose name stands in such a module as text. A single server loads nothing of
the cluster: only a server whose settings ask for a shared database does.
"""

import argparse
import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.syntax import syntax_tree

PACKAGE = "neaptide"
SERVES = f"{PACKAGE}.launch.serve"
CLUSTER = f"{PACKAGE}.cluster"
POLICY = Path(PACKAGE, "engine", "scheduler")
NOTEBOOK = "lab/notebook"
PAGES = ("*.md", "docs/**/*.md", "lab/**/*.md", "vllm-plugin/**/*.md")
ORDINARY_NUMBERS = {0, 1}
"""Common numbers that are not tuning choices."""
ELLIPSES = ("...", "…")


class Source(NamedTuple):
    """A Python file and its syntax tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")


def sources(root: Path, folder: str) -> list[Source]:
    """The Python files below a folder of the repository."""
    found = []
    for path in sorted((root / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(Source(path.relative_to(root), text, syntax_tree(text)))
    return found


# ---- lines -----------------------------------------------------------------------------------------------


def lines_by_package(files: Sequence[Source]) -> dict[str, int]:
    """Lines of Python by the first folder inside the top-level one; modules next to the folders count as ``.``."""
    lines: dict[str, int] = defaultdict(int)
    for source in files:
        parts = source.path.parts
        lines[parts[1] if len(parts) > 2 else "."] += source.lines
    return dict(lines)


# ---- the serving closure ---------------------------------------------------------------------------------


def module_name(path: Path) -> str:
    """The dotted name of a module, given its path from the root."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def closure(files: Sequence[Source], first: str = SERVES, without: str | None = None) -> set[str]:
    """Names of the modules that ``first`` leads to, itself included. Nothing leads into the package ``without``."""
    trees = {module_name(source.path): source.tree for source in files}
    found: set[str] = set()
    ahead = [first]
    while ahead:
        name = ahead.pop()
        if name in found or name not in trees or f"{name}.".startswith(f"{without}."):
            continue
        found.add(name)
        ahead += [name.rpartition(".")[0], *references(trees[name])]
    return found


def references(tree: ast.Module) -> Iterator[str]:
    """Names that may be modules: those of imports, and those in texts such as ``module:function``. Imports only for
    type checkers are left out."""
    for node in _run(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.partition(":")[0]


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a tree, except those under ``if TYPE_CHECKING``."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield from _run(child)


# ---- names and numbers -----------------------------------------------------------------------------------


def classes_that_stand_twice(files: Sequence[Source]) -> dict[str, list[str]]:
    """The modules of each class name that more than one module defines."""
    modules: dict[str, list[str]] = defaultdict(list)
    for source in files:
        for name in {node.name for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)}:
            modules[name].append(module_name(source.path))
    return {name: places for name, places in sorted(modules.items()) if len(places) > 1}


def numbers_in(source: Source) -> list[str]:
    """The places of numeric literals other than the ordinary numbers."""
    return [
        f"{source.path}:{node.lineno}: {node.value}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
        and node.value not in ORDINARY_NUMBERS
    ]


# ---- prose -----------------------------------------------------------------------------------------------


def docstrings(source: Source) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, those below variables included."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def comments(source: Source) -> Iterator[tuple[int, str]]:
    """Line and text of every block of comments; a comment after code is a block of its own."""
    block: list[str] = []
    start = 0
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            goes_on = block and token.start[0] == start + len(block) and token.line.lstrip().startswith("#")
            if not goes_on:
                if block:
                    yield start, " ".join(block)
                block, start = [], token.start[0]
            block.append(token.string.lstrip("#").strip())
    if block:
        yield start, " ".join(block)


def begins_with_of(source: Source) -> list[str]:
    """The places of docstrings that begin with "Of"."""
    return [f"{source.path}:{line}" for line, text in docstrings(source) if re.match(r"Of\b", text)]


def is_cut(text: str) -> bool:
    """Whether a text begins or ends in the middle of a sentence."""
    return text.startswith(ELLIPSES) or text.endswith(ELLIPSES)


def cut_texts(source: Source) -> list[str]:
    """The places of comments and docstrings that begin or end with an ellipsis."""
    return [f"{source.path}:{line}" for line, text in (*docstrings(source), *comments(source)) if is_cut(text)]


def pages(root: Path) -> dict[str, str]:
    """The text of every page by its path, the notebook's left out."""
    found = {path.relative_to(root).as_posix() for pattern in PAGES for path in root.glob(pattern)}
    return {
        name: (root / name).read_text(encoding="utf-8")
        for name in sorted(found)
        if not name.startswith((f"{NOTEBOOK}/", ".")) and "/." not in name
    }


def sentence_lengths(page: str) -> list[int]:
    """Words in each sentence of a page. Code is left out, and each cell of a table stands alone. Fewer than three words
    are a label, not a sentence."""
    prose = re.sub(r"^```.*?^```", "\n\n", page, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    prose = re.sub(r"`[^`]*`", "code", prose)
    prose = re.sub(r"^\s*(?:[-*]|\d+\.|#+|>)\s", "\n\n", prose, flags=re.MULTILINE)
    prose = re.sub(r"\||\n\s*\n", "\n\n", prose)
    lengths = []
    for paragraph in prose.split("\n\n"):
        for sentence in re.split(r"(?<=[.!?])[)\"*]*\s", paragraph):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if len(words) >= 3:
                lengths.append(len(words))
    return lengths


# ---- the report ------------------------------------------------------------------------------------------


class Report(NamedTuple):
    """All figures, and the places of those that should fall to zero."""

    lines: Mapping[str, int]
    figures: Mapping[str, int | float]
    places: Mapping[str, Sequence[str]]


def measure(root: Path) -> Report:
    """The figures of a checkout."""
    ours = sources(root, PACKAGE)
    lines = {f"{PACKAGE}/{name}": count for name, count in lines_by_package(ours).items()}
    for folder in ("lab", "vllm-plugin", "benchmarks", "tests", "tools"):
        if count := sum(source.lines for source in sources(root, folder)):
            lines[folder] = count
    total = sum(source.lines for source in ours)
    served, alone = closure(ours), closure(ours, without=CLUSTER)
    texts = pages(root)
    lengths = [length for text in texts.values() for length in sentence_lengths(text)]
    policy = [source for source in ours if source.path.parent == POLICY]
    twice = classes_that_stand_twice(ours)
    places = {
        "numeric literals in the policy": [place for source in policy for place in numbers_in(source)],
        "class names that stand twice": [f"{name}: {', '.join(modules)}" for name, modules in twice.items()],
        "docstrings that begin with Of": [place for source in ours for place in begins_with_of(source)],
        "texts that begin or end with an ellipsis": [place for source in ours for place in cut_texts(source)],
    }
    figures = {
        "package, lines of Python": total,
        "package without cluster": total - lines.get(f"{PACKAGE}/cluster", 0),
        "serving closure, modules": len(served),
        "serving closure, lines": sum(source.lines for source in ours if module_name(source.path) in served),
        "closure of a single server, modules": len(alone),
        "closure of a single server, lines": sum(s.lines for s in ours if module_name(s.path) in alone),
        "docs outside the notebook, words": sum(len(text.split()) for text in texts.values()),
        "docs, words in a sentence": round(sum(lengths) / max(len(lengths), 1), 1),
        "policy, lines": sum(source.lines for source in policy),
        **{name: len(found) for name, found in places.items()},
    }
    return Report(lines, figures, places)


def main() -> None:
    parser = argparse.ArgumentParser(description="How large the repository is, and how plainly it is written.")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="checkout to measure (this one)")
    parser.add_argument("--list", action="store_true", help="list the places counted by the last four figures")
    args = parser.parse_args()
    report = measure(args.root.resolve())
    for table in (report.lines, report.figures):
        for name, value in table.items():
            print(f"{name:42} {value:>10,}")
        print()
    if args.list:
        for name, found in report.places.items():
            print(f"{name}:", *found, sep="\n  ")


if __name__ == "__main__":
    main()
