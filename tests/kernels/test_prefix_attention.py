"""The work list as the kernel for GPUs has it, its reference in torch, and the choice of tiles; without Triton."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.kernels.choice import choose_kernels
from neaptide.kernels.kv_copy import reference as copies_by_torch
from neaptide.kernels.launching import wants_triton, why_not
from neaptide.kernels.layer_ops import TorchLayerOps
from neaptide.kernels.paged_attention import Shape, write_kv
from neaptide.kernels.paged_attention.work_list import WorkList, build_work_list, split_items
from neaptide.kernels.prefix_attention.reference import attend, slots_of
from neaptide.kernels.prefix_attention.tiles import TileEntry, Tiles, load_tiles, pick_tiles
from tests.kernels.cases import CPU, Case, tree_with_chunks

BLOCK, GROUP, ROWS = 16, 3, 64
TILE = ROWS // GROUP
SHAPE = Shape(6, 2, 16, BLOCK)


def listed(case: Case, most_keys: int = 1 << 20) -> WorkList:
    work = build_work_list(
        case.query_lens,
        case.seq_lens,
        case.step_tables(),
        case.block_size,
        GROUP,
        max_rows=ROWS,
        shared_chunk_tokens=TILE - 1,
    )
    return split_items(work, most_keys)


def seen(case: Case, work: WorkList) -> list[list[int]]:
    """Of every token the slots that its rows see, sorted."""
    slots = slots_of(case.step_tables().entries, case.block_size)
    found: list[list[int]] = [[] for _ in range(int(case.query_lens.sum()))]
    for first, last, table, first_key, last_key in work.items.tolist():
        begin = table * case.block_size
        for row in range(first, last):
            end = min(last_key, int(work.row_limits[row]))
            found[work.row_tokens[row]] += slots[begin + first_key : begin + max(first_key, end)].tolist()
    return [sorted(each) for each in found]


def context(case: Case) -> list[list[int]]:
    """Of every token the slots up to its own, sorted."""
    found = []
    for row, (query_len, seq_len) in enumerate(zip(case.query_lens.tolist(), case.seq_lens.tolist(), strict=True)):
        slots = (case.tables[row][:, None] * case.block_size + np.arange(case.block_size)).reshape(-1)
        found += [sorted(slots[: seq_len - query_len + token + 1].tolist()) for token in range(query_len)]
    return found


def check_parts(work: WorkList) -> None:
    """Every row of a token with several has a part of its own, and these stand side by side."""
    by_token: dict[int, list[int]] = {}
    for token, part in zip(work.row_tokens.tolist(), work.row_parts.tolist(), strict=True):
        by_token.setdefault(token, []).append(part)
    merges = {token: list(range(first, last)) for token, first, last in work.merges.tolist()}
    assert merges == {token: sorted(parts) for token, parts in by_token.items() if parts != [-1]}
    in_merges = [part for parts in merges.values() for part in parts]
    assert sorted(in_merges) == list(range(len(in_merges)))


def test_short_chunks_read_prefixes_with_decodes() -> None:
    """Those of 9 and of 21 tokens do; a chunk of 30 fills tiles by itself."""
    case = Case([(1, 100), (9, 100), (20, 97), (30, 100), (1, 100)])
    for request in (1, 2, 3):
        case.tables[request, :6] = case.tables[0, :6]
    work = listed(case)
    runs = work.items[work.items[:, 0] >= 61]
    assert [(last - first, begin, end) for first, last, _, begin, end in runs.tolist()] == [(21, 0, 96), (9, 0, 96)]
    assert seen(case, work) == context(case)


def test_long_items_are_cut_and_their_rows_are_parts() -> None:
    case = Case([(1, 99), (2, 30)])
    work = listed(case, 48)
    assert work.items.tolist() == [[0, 1, 0, 0, 48], [3, 4, 0, 48, 96], [4, 5, 0, 96, 100], [1, 3, 7, 0, 32]]
    assert work.row_tokens.tolist() == [0, 1, 2, 0, 0]
    assert work.row_limits.tolist() == [100, 31, 32, 100, 100]
    assert work.row_parts.tolist() == [0, -1, -1, 1, 2]
    assert work.merges.tolist() == [[0, 0, 3]]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 8)), max_size=5),
    st.integers(1, 100),
)
def test_every_token_sees_its_context_once(
    lens: list[tuple[int, int]], shared: list[tuple[int, int, int]], most_keys: int
) -> None:
    case = Case(lens, dim=2)
    for request, owner, num_blocks in shared:
        if request < len(lens) and owner < len(lens):
            count = min(num_blocks, lens[request][1] // BLOCK, lens[owner][1] // BLOCK)
            case.tables[request, :count] = case.tables[owner, :count]
    for work in (listed(case), listed(case, most_keys)):
        assert seen(case, work) == context(case)
        check_parts(work)


@pytest.mark.parametrize("most_keys", [1 << 20, 40])
@pytest.mark.parametrize("reversed_share", [0.0, 0.5])
def test_the_reference_against_float64(most_keys: int, reversed_share: float) -> None:
    case = tree_with_chunks()
    ids = np.unique(case.tables)
    chosen = ids[np.random.default_rng(0).random(len(ids)) < reversed_share]
    case.cache[chosen] = case.cache[chosen].flip(1)
    tables = case.step_tables(np.isin(case.tables, chosen))
    planner = case.planner("torch")
    write_kv(case.cache, case.new, planner(case.query_lens, case.seq_lens, tables))
    out = attend(case.query, case.cache, listed(case, most_keys), tables.entries)
    torch.testing.assert_close(out.double(), case.expected(), atol=1e-5, rtol=1e-5)


def entry(head_dim: int, group: int | None = None, device: str | None = None) -> TileEntry:
    tiles = Tiles(wide_rows=64, wide_keys=64, narrow_rows=16, narrow_keys=head_dim, stages=3, warps=4, registers=200)
    return TileEntry(element_bytes=2, head_dim=head_dim, group=group, device=device, source="a test", tiles=tiles)


def test_tiles_of_the_smallest_head_that_fits_and_of_this_device_and_group_before_others() -> None:
    general, large, here, group = entry(64), entry(128), entry(128, device="NVIDIA H100"), entry(128, 4, "NVIDIA H100")
    entries = [large, here, general, group]
    assert pick_tiles(entries, 48, 4, 2, "NVIDIA H100 80GB HBM3") == general.tiles
    assert pick_tiles(entries, 96, 3, 2, "NVIDIA A100") is large.tiles
    assert pick_tiles(entries, 96, 3, 2, "NVIDIA H100 80GB HBM3") is here.tiles
    assert pick_tiles(entries, 96, 4, 2, "NVIDIA H100 80GB HBM3") is group.tiles
    assert pick_tiles(entries, 256, 4, 2, "NVIDIA H100 80GB HBM3") is None
    assert pick_tiles(entries, 96, 4, 4, "NVIDIA H100 80GB HBM3") is None


def test_the_file_has_tiles_for_every_head_up_to_256_and_says_how_they_were_found() -> None:
    entries = load_tiles()
    for element_bytes in (2, 4):
        for head_dim in (1, 16, 64, 80, 128, 192, 256):
            tiles = pick_tiles(entries, head_dim, 4, element_bytes, "any")
            assert tiles is not None
            sizes = (tiles.wide_rows, tiles.wide_keys, tiles.narrow_rows, tiles.narrow_keys)
            assert all(size >= 16 and size & (size - 1) == 0 for size in sizes)
    assert all(each.source for each in entries)


def test_a_file_with_other_fields_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    path.write_text('[{"element_bytes": 2, "tiles": {"wide_rows": 16}}]')
    with pytest.raises(TypeError, match="wide_keys"):
        load_tiles(path)


def test_where_triton_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert why_not(CPU) == "Triton compiles nothing for device 'cpu'"
    assert why_not(cuda) is None
    assert [wants_triton(cuda, each) for each in ("auto", "triton", "torch")] == [True, True, False]
    assert [wants_triton(CPU, each) for each in ("auto", "triton", "torch")] == [False, True, False]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_not(CPU) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert why_not(cuda) == "Triton is not installed"


def test_a_kernel_that_is_insisted_on_and_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="gpu_kernels = 'triton' is not available: Triton"):
        choose_kernels(SHAPE, dtype=torch.float32, device=CPU, gpu_kernels="triton")


def test_a_gpu_without_triton_computes_with_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    chosen = choose_kernels(SHAPE, dtype=torch.float32, device=torch.device("cuda"))
    assert (chosen.kind, type(chosen.layer_ops), chosen.slot_copier) == ("torch", TorchLayerOps, copies_by_torch)
    assert [message.rpartition(": ")[2] for message in caplog.messages] == ["Triton is not installed"]


@pytest.mark.parametrize(
    ("dtype", "cpu_kernels"), [(torch.float16, "auto"), (torch.float32, "torch")], ids=["no such kernel", "not wanted"]
)
def test_a_cpu_without_kernels_in_c_computes_with_torch(dtype: torch.dtype, cpu_kernels: str) -> None:
    chosen = choose_kernels(SHAPE, dtype=dtype, device=CPU, cpu_kernels=cpu_kernels)
    assert (chosen.kind, type(chosen.layer_ops), chosen.slot_copier) == ("torch", TorchLayerOps, copies_by_torch)
