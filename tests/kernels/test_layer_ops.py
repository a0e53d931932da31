"""What a layer computes between its products, in C, against torch in float64."""

import shutil
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neaptide.kernels.layer_ops import NativeLayerOps, TorchLayerOps
from neaptide.kernels.native import COMPILERS

CPU = torch.device("cpu")
KINDS = [TorchLayerOps, *([NativeLayerOps] if any(map(shutil.which, COMPILERS)) else [])]


class Slots(NamedTuple):
    """All of a plan that matters here."""

    slots: Tensor


@pytest.fixture(params=KINDS)
def ops(request: pytest.FixtureRequest) -> TorchLayerOps:
    made: TorchLayerOps = request.param()
    return made


@pytest.mark.parametrize("shape", [(1, 576), (5, 7), (33, 100)])
def test_rms_norm(ops: TorchLayerOps, shape: tuple[int, int]) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[1])
    expected = F.rms_norm(x.double(), (shape[1],), weight.double(), 1e-5)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [16, 7, 40])
def test_norm_of_heads(ops: TorchLayerOps, dim: int) -> None:
    whole, weight = torch.randn(5, 9, dim) * 3, torch.randn(dim)
    expected = whole.double()
    expected[:, 2:6] = F.rms_norm(expected[:, 2:6], (dim,), weight.double(), 1e-5)
    ops.norm_heads_(whole[:, 2:6], weight, 1e-5)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1536), (5, 7), (33, 100)])
def test_silu_multiply(ops: TorchLayerOps, shape: tuple[int, int]) -> None:
    gate, up = torch.randn(shape) * 20, torch.randn(shape)
    gate[0, 0], gate[-1, -1] = -200.0, 200.0
    expected = F.silu(gate.double()) * up.double()
    found = ops.silu_multiply(torch.cat((gate, up), dim=1))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def rotated(qkv: Tensor, rotation: Tensor, num_rotated: int) -> Tensor:
    """One pair at a time, as complex numbers."""
    out = qkv.double().clone()
    for token in range(qkv.shape[0]):
        for head in range(num_rotated):
            for pair in range(qkv.shape[2] // 2):
                place = slice(2 * pair, 2 * pair + 2)
                number = torch.view_as_complex(qkv[token, head, place].double()) * rotation[token, 0, pair].to(
                    torch.complex128
                )
                out[token, head, place] = torch.view_as_real(number)
    return out


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 16), (1, 1, 2), (3, 3, 10)])
def test_rotate_and_store(ops: TorchLayerOps, heads: int, kv_heads: int, dim: int) -> None:
    tokens, slots = 5, torch.tensor([7, 0, 3, 19, 12])
    qkv, angles = torch.randn(tokens, heads + 2 * kv_heads, dim), torch.randn(tokens, 1, dim // 2)
    rotation = torch.polar(torch.ones_like(angles), angles)
    cache = torch.full((5, 4, 2 * kv_heads, dim), -1.0)
    expected = rotated(qkv, rotation, heads + kv_heads)
    ops.rotate_and_store(qkv, rotation, cache, Slots(slots))
    torch.testing.assert_close(qkv.double(), expected, rtol=1e-5, atol=1e-6)
    flat = cache.view(20, 2 * kv_heads, dim)
    assert torch.equal(flat[slots], qkv[:, heads:])
    others = [slot for slot in range(20) if slot not in slots.tolist()]
    assert (flat[others] == -1.0).all()


def test_without_a_rotation_heads_are_only_stored(ops: TorchLayerOps) -> None:
    slots, qkv = torch.tensor([7, 0, 3]), torch.randn(3, 10, 16)
    cache, expected = torch.full((5, 4, 4, 16), -1.0), qkv.clone()
    ops.rotate_and_store(qkv, None, cache, Slots(slots))
    assert torch.equal(qkv, expected)
    assert torch.equal(cache.view(20, 4, 16)[slots], qkv[:, 6:])
    assert (cache == -1.0).all(dim=(2, 3)).sum() == 17


@pytest.mark.parametrize("slot", [-1, 20])
def test_slots_outside_the_cache_are_refused(ops: TorchLayerOps, slot: int) -> None:
    qkv, rotation = torch.randn(1, 4, 2), torch.ones(1, 1, 1, dtype=torch.complex64)
    with pytest.raises((IndexError, RuntimeError)):
        ops.rotate_and_store(qkv, rotation, torch.zeros(5, 4, 2, 2), Slots(torch.tensor([slot])))


def test_nan_stays_in_its_row(ops: TorchLayerOps) -> None:
    x = torch.randn(3, 40)
    x[1, 3] = float("nan")
    assert ops.rms_norm(x, torch.ones(40), 1e-5).isnan().all(dim=1).tolist() == [False, True, False]
    assert ops.silu_multiply(x.clone()).isnan().any(dim=1).tolist() == [False, True, False]


def of_bfloat16(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_bf16_is_computed_in_fp32_and_rounded_once(rows: int) -> None:
    """Half of the last place, and a little for the order in which fp32 adds."""
    ops = KINDS[-1]()
    half_place = {"rtol": 2**-8 * 1.01, "atol": 1e-6}
    x, weight = of_bfloat16((rows, 100), 1, 3.0), of_bfloat16((100,), 2)
    expected = F.rms_norm(x.double(), (100,), weight.double(), 1e-5)
    found = ops.rms_norm(x, weight, 1e-5)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, **half_place)
    heads, weight = of_bfloat16((rows, 9, 40), 3, 3.0), of_bfloat16((40,), 4)
    by_heads = heads.double()
    by_heads[:, 2:6] = F.rms_norm(by_heads[:, 2:6], (40,), weight.double(), 1e-5)
    ops.norm_heads_(heads[:, 2:6], weight, 1e-5)
    torch.testing.assert_close(heads.double(), by_heads, **half_place)
    gate, up = of_bfloat16((rows, 100), 5, 20.0), of_bfloat16((rows, 100), 6)
    found = ops.silu_multiply(torch.cat((gate, up), dim=1))
    torch.testing.assert_close(found.double(), F.silu(gate.double()) * up.double(), **half_place)


def test_rotated_and_stored_in_bf16_as_by_torch() -> None:
    """Numbers whose products and sums are exact in fp32 but for one rounding: the same bits."""
    tokens, slots = 5, torch.tensor([7, 0, 3, 19, 12])
    qkv, angles = of_bfloat16((tokens, 8, 16), 7), torch.randn(tokens, 1, 8, generator=torch.Generator().manual_seed(8))
    rotation = torch.polar(torch.ones_like(angles), angles)
    same, caches = qkv.clone(), [torch.full((5, 4, 4, 16), -1.0, dtype=torch.bfloat16) for _ in range(2)]
    KINDS[-1]().rotate_and_store(qkv, rotation, caches[0], Slots(slots))
    TorchLayerOps().rotate_and_store(same, rotation, caches[1], Slots(slots))
    torch.testing.assert_close(qkv, same, rtol=2**-7, atol=1e-6)
    assert torch.equal(caches[0].view(20, 4, 16)[slots], qkv[:, 4:])
    assert torch.equal(caches[0] == -1.0, caches[1] == -1.0)


def test_bf16_numbers_that_are_none_stay_in_their_row() -> None:
    ops = KINDS[-1]()
    x = of_bfloat16((3, 40), 9)
    x[1, 3] = float("nan")
    assert ops.rms_norm(x, x[0], 1e-5).isnan().all(dim=1).tolist() == [False, True, False]
    assert ops.silu_multiply(x.clone()).isnan().any(dim=1).tolist() == [False, True, False]


def test_other_types_and_threads_are_left_to_torch() -> None:
    found = KINDS[-1]()
    x = torch.randn(3, 8, dtype=torch.float64).to(torch.float16)
    assert torch.equal(found.rms_norm(x, x[0], 1e-5), TorchLayerOps().rms_norm(x, x[0], 1e-5))
    assert torch.equal(found.silu_multiply(x.clone()), TorchLayerOps().silu_multiply(x.clone()))
    heads, same = x.clone().view(3, 2, 4), x.clone().view(3, 2, 4)
    found.norm_heads_(heads, x[0, :4], 1e-5)
    TorchLayerOps().norm_heads_(same, x[0, :4], 1e-5)
    assert torch.equal(heads, same)
    assert not torch.equal(heads, x.view(3, 2, 4))
    assert torch.equal(found.rms_norm(x.float(), x[0], 1e-5), TorchLayerOps().rms_norm(x.float(), x[0], 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_threads_share_are_the_same_bits(two_threads: None, dtype: torch.dtype) -> None:
    tokens = 131
    x, heads = of_bfloat16((tokens, 80), 10).to(dtype), of_bfloat16((tokens, 8, 16), 11).to(dtype)
    angles = torch.randn(tokens, 1, 8, generator=torch.Generator().manual_seed(12))
    rotation, slots = torch.polar(torch.ones_like(angles), angles), Slots(torch.arange(tokens).flip(0))

    def computed() -> list[Tensor]:
        ops, normed, rotated = KINDS[-1](), heads.clone(), heads.clone()
        cache = torch.zeros(tokens, 1, 4, 16, dtype=dtype)
        ops.norm_heads_(normed, heads[0, 0], 1e-5)
        ops.rotate_and_store(rotated, rotation, cache, slots)
        return [ops.rms_norm(x, x[0], 1e-5), ops.silu_multiply(x), normed, rotated, cache]

    shared = computed()
    torch.set_num_threads(1)
    for by_two, by_one in zip(shared, computed(), strict=True):
        assert torch.equal(by_two, by_one)
