"""The prefix tree of a job's token file: which of its rows begin alike, and for how long.

It stands beside the token file (``STEM.prefixes``), made once where the prompts are checked: no step of the engine
waits while tens of thousands of prompts are compared.
"""

import io
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neaptide.engine.arrays import IntArray
from neaptide.engine.offline.planning.order import PromptOrder
from neaptide.engine.offline.planning.prompts import Prompts
from neaptide.engine.offline.token_file import TokenFile
from neaptide.engine.private_files import private_opener

UNIT_TOKENS = 16
"""Lengths of shared prefixes are cut to multiples of this: a cache shares whole blocks, and none is smaller."""
NO_NODE = -1


def prefixes_path(stem: str | Path) -> Path:
    return Path(f"{stem}.prefixes")


@dataclass(slots=True, frozen=True)
class PrefixTree:
    """Rows in an order in which those that share a prefix follow one another, and a node for every shared prefix.

    Rows that share nothing keep their place, and so does every group by its first row.
    """

    rows: IntArray
    """[rows] their numbers in the token file, in that order; all of its rows, or those that are wanted."""
    node: IntArray
    """[rows] the node of the longest prefix that the row shares with another, ``NO_NODE`` if it shares none."""
    parent: IntArray
    """[nodes] ``NO_NODE`` at the top."""
    depth_tokens: IntArray
    """[nodes] length of the prefix, from the prompt's begin."""
    first: IntArray
    """[nodes] where its rows begin in ``rows`` ..."""
    end: IntArray
    """[nodes] ... and end."""

    @property
    def num_wanted(self) -> IntArray:
        """[nodes] rows below each."""
        return self.end - self.first

    def new_tokens(self, lengths: IntArray) -> IntArray:
        """[rows] of prompts of these lengths, without what a row shares with one before it in this order."""
        if not len(self.parent):
            return lengths
        of_node = self.depth_tokens - np.where(self.parent == NO_NODE, 0, self.depth_tokens[self.parent])
        new = lengths - np.where(self.node == NO_NODE, 0, self.depth_tokens[self.node])
        wanted = self.num_wanted > 0
        np.add.at(new, self.first[wanted], of_node[wanted])
        return new

    @property
    def arrays(self) -> dict[str, IntArray]:
        return {name: getattr(self, name) for name in PrefixTree.__slots__}

    def restricted(self, rows: IntArray) -> "PrefixTree":
        """The tree with these of its rows only, in the tree's order."""
        wanted = np.zeros(int(self.rows.max(initial=-1)) + 1, np.bool_)
        wanted[rows] = True
        kept = wanted[self.rows]
        places = np.concatenate(([0], np.cumsum(kept)))
        return PrefixTree(
            self.rows[kept], self.node[kept], self.parent, self.depth_tokens, places[self.first], places[self.end]
        )

    def save(self, stem: str | Path) -> None:
        """Durably, as its owner's alone."""
        arrays = self.arrays if len(self.parent) else {}  # most files share nothing
        with open(prefixes_path(stem), "wb", opener=private_opener) as f:
            np.savez(f, allow_pickle=False, **arrays)
            f.flush()
            os.fsync(f.fileno())

    @classmethod
    def load(cls, stem: str | Path, num_rows: int) -> "PrefixTree":
        """The tree that stands beside a token file; without one, or with one that does not fit, every row is alone."""
        try:
            with np.load(io.BytesIO(prefixes_path(stem).read_bytes()), allow_pickle=False) as file:
                tree = cls(**{name: file[name] for name in cls.__slots__})
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return cls.without_sharing(num_rows)
        return tree if np.array_equal(np.sort(tree.rows), np.arange(num_rows)) else cls.without_sharing(num_rows)

    @classmethod
    def without_sharing(cls, num_rows: int) -> "PrefixTree":
        none = np.zeros(0, np.int64)
        return cls(np.arange(num_rows), np.full(num_rows, NO_NODE), none, none, none, none)

    @classmethod
    def of(cls, tokens: TokenFile) -> "PrefixTree":
        """Compares all prompts."""
        order = PromptOrder.of(Prompts([tokens]))
        rows, shared_tokens = groups_in_file_order(order.rows, whole_units(order.shared_tokens, UNIT_TOKENS))
        return cls(rows, *_nodes(shared_tokens))

    @classmethod
    def of_order(cls, order: PromptOrder, unit_tokens: int = UNIT_TOKENS) -> "PrefixTree":
        """The tree of sorted prompts, in their order. With a unit of 1 it has every token that is shared."""
        return cls(order.rows, *_nodes(whole_units(order.shared_tokens, unit_tokens)))


def whole_units(num_tokens: IntArray, unit_tokens: int) -> IntArray:
    return num_tokens // unit_tokens * unit_tokens


def write_prefixes(stem: str | Path) -> None:
    """Makes the tree of a finished token file; one for which the memory does not suffice is one without sharing."""
    tokens = TokenFile(stem)
    try:
        tree = PrefixTree.of(tokens)
    except MemoryError:  # an order is not worth a batch
        tree = PrefixTree.without_sharing(len(tokens))
    tree.save(stem)


def groups_in_file_order(rows: IntArray, shared_tokens: IntArray) -> tuple[IntArray, IntArray]:
    """Rows that share something stay together; the groups stand in the order of their first rows in the file."""
    if not len(rows):
        return rows, shared_tokens
    starts = np.flatnonzero(shared_tokens == 0)
    group = np.cumsum(shared_tokens == 0) - 1
    place = np.argsort(np.minimum.reduceat(rows, starts)[group], kind="stable")
    return rows[place], shared_tokens[place]


def _nodes(shared_tokens: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """From what every row shares with the one before it: the rows' nodes, and parent, depth, first row and end of
    each node. One pass with the path of open nodes; rows that share as much as the one before them change nothing."""
    parent: list[int] = []
    depth: list[int] = []
    first: list[int] = []
    end: list[int] = []
    path: list[int] = []
    changes = np.flatnonzero(np.diff(shared_tokens, prepend=0, append=0))
    deepest: list[int] = []
    """[changes] Node of the rows from each of them on ..."""
    begun: list[tuple[int, int]] = []
    """... but for rows at which a deeper one begins: row and node."""
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
