"""Prefix tree of a job's token file: the prefixes that its prompts share.

It is stored with the token file (``STEM.prefixes``). It is made once, when the prompts are checked, so that no step of
the engine waits for the comparison of tens of thousands of prompts.
"""

import io
import os
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from neaptide.engine.arrays import IntArray
from neaptide.engine.offline.planning.order import PromptOrder
from neaptide.engine.offline.planning.prompts import Prompts
from neaptide.engine.offline.token_file import TokenFile, offsets_path
from neaptide.engine.private_files import private_opener

UNIT_TOKENS = 16
"""Unit of shared prefix lengths, in tokens: a cache shares whole blocks, and none is smaller."""
NO_NODE = -1


def prefixes_path(stem: str | Path) -> Path:
    return Path(f"{stem}.prefixes")


@dataclass(slots=True, frozen=True)
class PrefixTree:
    """Rows ordered so that those that share a prefix are consecutive, and a node for every shared prefix.

    Groups are ordered by their first row in the file.
    """

    rows: IntArray
    """[rows] line numbers in the token file, in this order; all lines or a subset."""
    node: IntArray
    """[rows] node of the longest prefix that the row shares with another; ``NO_NODE`` if it shares none."""
    parent: IntArray
    """[nodes] parent; ``NO_NODE`` at the top."""
    depth_tokens: IntArray
    """[nodes] length of the prefix, from the prompt's start."""
    first: IntArray
    """[nodes] index of its first row in ``rows``."""
    end: IntArray
    """[nodes] index after its last row in ``rows``."""

    @property
    def num_wanted(self) -> IntArray:
        """[nodes] number of rows below each."""
        return self.end - self.first

    @property
    def num_levels(self) -> int:
        """The most shared prefixes that stand above one another."""
        levels, parents = [0] * (len(self.parent) + 1), self.parent.tolist()  # the last one is that of ``NO_NODE``
        for node in np.argsort(self.depth_tokens, kind="stable").tolist():
            levels[node] = levels[parents[node]] + 1
        return max(levels)

    def new_tokens(self, lengths: IntArray) -> IntArray:
        """[rows] prompt tokens that are not shared with a row before; ``lengths`` are the prompts' tokens."""
        if not len(self.parent):
            return lengths
        of_node = self.depth_tokens - np.where(self.parent == NO_NODE, 0, self.depth_tokens[self.parent])
        new = lengths - np.where(self.node == NO_NODE, 0, self.depth_tokens[self.node])
        wanted = self.num_wanted > 0
        np.add.at(new, self.first[wanted], of_node[wanted])
        return new

    def new_tokens_at(self, places: IntArray, lengths: IntArray) -> IntArray:
        """``new_tokens`` of a subset: the rows at these ascending places, with these prompt lengths."""
        node, before = self.node[places], np.concatenate(([NO_NODE], places[:-1]))
        # Climbs to the deepest prefix that the row before shares.
        rising = np.flatnonzero(node != NO_NODE)
        while len(rising):
            rising = rising[self.first[node[rising]] > before[rising]]
            node[rising] = self.parent[node[rising]]
            rising = rising[node[rising] != NO_NODE]
        shares = node != NO_NODE
        new = lengths.copy()
        new[shares] -= self.depth_tokens[node[shares]]
        return new

    @property
    def arrays(self) -> dict[str, IntArray]:
        return {name: getattr(self, name) for name in PrefixTree.__slots__}

    def restricted(self, rows: IntArray) -> "PrefixTree":
        """The tree with a subset of its rows, in the tree's order."""
        wanted = np.zeros(int(self.rows.max(initial=-1)) + 1, np.bool_)
        wanted[rows] = True
        kept = wanted[self.rows]
        places = np.concatenate(([0], np.cumsum(kept)))
        return PrefixTree(
            self.rows[kept], self.node[kept], self.parent, self.depth_tokens, places[self.first], places[self.end]
        )

    def save(self, stem: str | Path, is_durable: bool = True) -> None:
        """Writes the tree to a private file."""
        arrays = self.arrays if len(self.parent) else {}  # Most files share nothing.
        with open(prefixes_path(stem), "wb", opener=private_opener) as f:
            np.savez(f, allow_pickle=False, **arrays)
            f.flush()
            if is_durable:
                os.fsync(f.fileno())

    @classmethod
    def load(cls, stem: str | Path, num_rows: int) -> "PrefixTree":
        """The tree stored with a token file. If it is missing or does not match, a tree without sharing."""
        try:
            with np.load(io.BytesIO(prefixes_path(stem).read_bytes()), allow_pickle=False) as file:
                tree = cls(**{name: file[name] for name in cls.__slots__})
        except Exception:  # Reading a damaged archive raises a dozen kinds of errors.
            return cls.without_sharing(num_rows)
        return tree if tree.places_in(num_rows) is not None else cls.without_sharing(num_rows)

    def places_in(self, num_rows: int) -> IntArray | None:
        """[lines of the file] place of each line in this order; None if it is not an order of ``num_rows`` lines."""
        if self.rows.shape != (num_rows,) or not np.issubdtype(self.rows.dtype, np.integer):
            return None
        if num_rows and (int(self.rows.min()) < 0 or int(self.rows.max()) >= num_rows):
            return None
        places = np.full(num_rows, NO_NODE)
        places[self.rows] = np.arange(num_rows)
        return places if (places != NO_NODE).all() else None

    @classmethod
    def without_sharing(cls, num_rows: int) -> "PrefixTree":
        none = np.zeros(0, np.int64)
        return cls(np.arange(num_rows), np.full(num_rows, NO_NODE), none, none, none, none)

    @classmethod
    def of(cls, tokens: TokenFile) -> "PrefixTree":
        """Makes the tree of a token file by comparing all prompts."""
        order = PromptOrder.of(Prompts([tokens]))
        rows, shared_tokens = groups_in_file_order(order.rows, whole_units(order.shared_tokens, UNIT_TOKENS))
        return cls(rows, *_nodes(shared_tokens))

    @classmethod
    def of_order(cls, order: PromptOrder, unit_tokens: int = UNIT_TOKENS) -> "PrefixTree":
        """The tree of sorted prompts, in their order. A unit of 1 keeps every shared token."""
        return cls(order.rows, *_nodes(whole_units(order.shared_tokens, unit_tokens)))


class OrderedFile:
    """An immutable token file with its prefix tree; all users share one object.

    Raises:
        OSError, ValueError: as ``TokenFile``.
    """

    def __init__(self, stem: str) -> None:
        self.tokens = TokenFile(stem)
        self.tree = PrefixTree.load(stem, len(self.tokens))
        self.place = np.empty(len(self.tokens), np.int64)
        """[rows] place of each line in the tree's order."""
        self.place[self.tree.rows] = np.arange(len(self.tokens))


class OrderedFiles:
    """Cache of the token files in use, each read once.

    A large file comes in many messages. Reading and ordering it for each of them would delay a step.
    """

    def __init__(self) -> None:
        self._held: WeakValueDictionary[tuple[object, ...], OrderedFile] = WeakValueDictionary()

    def open(self, stem: str) -> OrderedFile:
        """Raises OSError or ValueError, as ``TokenFile``."""
        key = (stem, *map(_version, (offsets_path(stem), prefixes_path(stem))))
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = OrderedFile(stem)
        return found


def _version(path: Path) -> tuple[int, ...] | None:
    """Identity and version of a file; None without one."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def whole_units(num_tokens: IntArray, unit_tokens: int) -> IntArray:
    return num_tokens // unit_tokens * unit_tokens


def write_prefixes(stem: str | Path, is_durable: bool = True) -> None:
    """Makes and stores the tree of a finished token file; without sharing if memory runs out."""
    tokens = TokenFile(stem)
    try:
        tree = PrefixTree.of(tokens)
    except MemoryError:  # A missing order must not fail the batch.
        tree = PrefixTree.without_sharing(len(tokens))
    tree.save(stem, is_durable)


def groups_in_file_order(rows: IntArray, shared_tokens: IntArray) -> tuple[IntArray, IntArray]:
    """Keeps rows that share a prefix together and orders the groups by their first rows in the file."""
    if not len(rows):
        return rows, shared_tokens
    starts = np.flatnonzero(shared_tokens == 0)
    group = np.cumsum(shared_tokens == 0) - 1
    place = np.argsort(np.minimum.reduceat(rows, starts)[group], kind="stable")
    return rows[place], shared_tokens[place]


def _nodes(shared_tokens: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Builds the nodes from the tokens that every row shares with the one before it.

    Returns the rows' nodes, and parent, depth, first row and end of each node. It makes one pass with the path of open
    nodes; rows that share as much as the one before them change nothing.
    """
    parent: list[int] = []
    depth: list[int] = []
    first: list[int] = []
    end: list[int] = []
    path: list[int] = []
    changes = np.flatnonzero(np.diff(shared_tokens, prepend=0, append=0))
    deepest: list[int] = []
    """[changes] node of the rows from each change on."""
    begun: list[tuple[int, int]] = []
    """Row and node of the exceptions, at which a deeper node begins."""
    depths = np.append(shared_tokens, 0)[changes].tolist()
    for place, shared in zip(changes.tolist(), depths, strict=True):
        closed = NO_NODE
        while path and depth[path[-1]] > shared:
            closed = path.pop()
            end[closed] = place
        if shared and (not path or depth[path[-1]] < shared):
            made = len(parent)
            parent.append(path[-1] if path else NO_NODE)
            depth.append(shared)
            first.append(place - 1 if closed == NO_NODE else first[closed])
            end.append(0)
            if closed == NO_NODE:
                begun.append((place - 1, made))
            else:
                parent[closed] = made
            path.append(made)
        deepest.append(path[-1] if path else NO_NODE)
    node = np.full(len(shared_tokens), NO_NODE)
    if deepest:
        node[changes[0] :] = np.repeat(deepest, np.diff(changes, append=len(shared_tokens)))
    rows, nodes = np.array(begun, np.int64).reshape(-1, 2).T
    node[rows] = nodes
    return node, *(np.array(column, np.int64) for column in (parent, depth, first, end))  # type: ignore[return-value]
