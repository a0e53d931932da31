"""The prefix tree of a token file against a comparison of every prompt with every other."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.engine.offline.prefix_tree import NO_NODE, UNIT_TOKENS, PrefixTree, prefixes_path, write_prefixes
from neaptide.engine.offline.token_file import TokenFile, TokenFileWriter

Prompt = list[int]
UNITS = [[unit] * UNIT_TOKENS for unit in range(3)]
prompts = st.lists(
    st.builds(
        lambda units, tail: [token for unit in units for token in unit] + tail,
        st.lists(st.sampled_from(UNITS), max_size=4),
        st.lists(st.integers(5, 6), max_size=3),
    ),
    max_size=8,
)


def written(directory: Path, rows: list[Prompt]) -> TokenFile:
    with TokenFileWriter(directory / "job") as writer:
        for prompt in rows:
            writer.append(prompt)
    return TokenFile(directory / "job")


def shared_tokens(one: Prompt, other: Prompt) -> int:
    length = min(len(one), len(other))
    same = next((i for i in range(length) if one[i] != other[i]), length)
    return same // UNIT_TOKENS * UNIT_TOKENS


@given(prompts)
def test_nodes_are_the_prefixes_that_rows_share_and_no_others(rows: list[Prompt]) -> None:
    with TemporaryDirectory() as directory:
        tree = PrefixTree.of(written(Path(directory), rows))
    wanted = {
        (tuple(rows[i][: shared_tokens(rows[i], rows[j])]))
        for i in range(len(rows))
        for j in range(i)
        if shared_tokens(rows[i], rows[j])
    }
    columns = zip(tree.first.tolist(), tree.end.tolist(), tree.depth_tokens.tolist(), strict=True)
    below = {tuple(rows[tree.rows[first]][:depth]): set(tree.rows[first:end].tolist()) for first, end, depth in columns}
    assert below == {
        prefix: {i for i, prompt in enumerate(rows) if tuple(prompt[: len(prefix)]) == prefix} for prefix in wanted
    }


@given(prompts)
def test_a_rows_node_is_its_longest_shared_prefix_and_parents_are_the_next_shorter_ones(rows: list[Prompt]) -> None:
    with TemporaryDirectory() as directory:
        tree = PrefixTree.of(written(Path(directory), rows))
    assert sorted(tree.rows.tolist()) == list(range(len(rows)))
    for row, node in zip(tree.rows.tolist(), tree.node.tolist(), strict=True):
        others = {shared_tokens(rows[row], prompt) for i, prompt in enumerate(rows) if i != row} - {0}
        path = []
        while node != NO_NODE:
            path.append(int(tree.depth_tokens[node]))
            node = int(tree.parent[node])
        assert path == sorted(others, reverse=True)


@given(prompts, st.sets(st.integers(0, 7)))
def test_a_tree_of_some_rows_counts_only_these(rows: list[Prompt], some: set[int]) -> None:
    with TemporaryDirectory() as directory:
        tree = PrefixTree.of(written(Path(directory), rows))
    kept = np.array(sorted(row for row in some if row < len(rows)), np.int64)
    restricted = tree.restricted(kept)
    assert restricted.rows.tolist() == [row for row in tree.rows.tolist() if row in set(kept.tolist())]
    for node, count in enumerate(restricted.num_wanted.tolist()):
        below = tree.rows[tree.first[node] : tree.end[node]]
        assert count == np.isin(below, kept).sum()


def test_groups_stand_in_the_order_of_their_first_rows(tmp_path: Path) -> None:
    a, b = UNITS[1], UNITS[0]
    tree = PrefixTree.of(written(tmp_path, [[9], [*a, 3], [*b, 3], [8], [*b, 1], [*a, 2]]))
    assert tree.rows.tolist() == [0, 5, 1, 4, 2, 3]


def test_rows_that_share_nothing_keep_file_order(tmp_path: Path) -> None:
    tree = PrefixTree.of(written(tmp_path, [[3], [1] * 40, [], [2] * 40]))
    assert (tree.rows.tolist(), len(tree.parent)) == ([0, 1, 2, 3], 0)


def test_it_is_found_again_beside_its_token_file(tmp_path: Path) -> None:
    tokens = written(tmp_path, [[*UNITS[1], 3], [*UNITS[1], 4], [9]])
    write_prefixes(tmp_path / "job")
    found = PrefixTree.load(tmp_path / "job", 3)
    assert {name: column.tolist() for name, column in found.arrays.items()} == {
        name: column.tolist() for name, column in PrefixTree.of(tokens).arrays.items()
    }
    assert len(found.parent) == 1


@pytest.mark.parametrize("damage", ["missing", "torn", "empty", "another method", "of another file"])
def test_without_one_that_fits_every_row_is_alone(tmp_path: Path, damage: str) -> None:
    written(tmp_path, [[*UNITS[1], 3], [*UNITS[1], 4]])
    write_prefixes(tmp_path / "job")
    path = prefixes_path(tmp_path / "job")
    if damage == "missing":
        path.unlink()
    elif damage == "torn":
        path.write_bytes(path.read_bytes()[:100])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "another method":  # of compression, in the archive's directory
        content = bytearray(path.read_bytes())
        content[content.index(b"PK\x01\x02") + 10] = 77
        path.write_bytes(content)
    num_rows = 3 if damage == "of another file" else 2
    tree = PrefixTree.load(tmp_path / "job", num_rows)
    assert (tree.rows.tolist(), len(tree.parent)) == (list(range(num_rows)), 0)


def test_a_file_too_large_to_compare_goes_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_windows(tokens: TokenFile, *args: object) -> None:
        raise MemoryError

    written(tmp_path, [[*UNITS[1], 3], [*UNITS[1], 4]])
    monkeypatch.setattr(TokenFile, "fill_windows", fill_windows)
    write_prefixes(tmp_path / "job")
    assert len(PrefixTree.load(tmp_path / "job", 2).parent) == 0
