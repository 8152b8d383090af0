"""Warps that fetch and warps that multiply: the same bits as the plain kernels, on a Hopper GPU."""

import pytest
import torch

from ep_moe.kernels import grouped_gemm as plain
from ep_moe.kernels import hopper as hopper_kernels
from ep_moe.kernels.device import architecture
from ep_moe.kernels.grouped_wgrad import grouped_wgrad
from ep_moe.kernels.tiles import Tile
from ep_moe.ops import activation as activations
from ep_moe.testing import assert_close
from ep_moe.types import Packed
from tests.helpers import offsets_of

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SIZES = {
    "ragged": (130, 1, 300, 0, 63, 257),
    "empty first and last": (0, 128, 0, 0, 129, 0),
    "one takes all": (0, 0, 700),
    "all empty": (0, 0, 0),
    "one expert": (5,),
    "many": (64, 0, 1, 127) * 40,
}
WIDTHS = [(128, 256), (192, 520), (200, 264), (704, 72)]  # depth, columns
TILES = {
    "three stages": Tile(128, 256, 64, 8, 3, tma=True),
    "four stages": Tile(128, 256, 64, 8, 4, tma=True, tma_store=False, group_m=2),
    "high": Tile(256, 128, 64, 8, 3, tma=True),
}


@pytest.fixture
def hopper():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU: torch.cuda.is_available() is False")
    device = torch.device("cuda", torch.cuda.current_device())
    if architecture(device) != "sm_90":
        pytest.skip(f"needs a GPU of architecture sm_90, this one is {architecture(device)}")
    return device


def make_packed(sizes, arrived_rows, top_k, device):
    """Garbage where no expert owns a row."""
    slots = sum(sizes)
    index = torch.randint(arrived_rows, (slots,), dtype=torch.int32, device=device)
    tail = torch.full((5,), -(2**30), dtype=torch.int32, device=device)
    choice = torch.randint(top_k, (slots + 5,), dtype=torch.int32, device=device)
    return Packed(torch.cat([index, tail]), choice, choice[:, None], offsets_of(sizes, device))


def normal(*shape, device, dtype, scale=1.0):
    return (torch.randn(shape, device=device) * scale).to(dtype)


def same(got, expected, rows):
    assert torch.equal(got[:rows], expected[:rows])
    assert got[rows:].isnan().all(), "a row that no expert owns was written"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("depth,columns", WIDTHS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES.keys())
def test_products(tile, sizes, depth, columns, dtype, hopper):
    make, rows = {"device": hopper, "dtype": dtype}, sum(sizes)
    x = normal(rows + 5, depth, **make)
    x[rows:] = torch.nan
    for transposed in (False, True):
        shape = (depth, columns) if transposed else (columns, depth)
        weight = normal(len(sizes), *shape, scale=depth**-0.5, **make)
        expected, got = (
            plain.grouped_gemm(
                x, weight, offsets_of(sizes, hopper), transposed=transposed, tile=each
            )
            for each in (tile, tile._replace(specialize=True))
        )
        same(got, expected, rows)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES.keys())
def test_hidden_and_back(tile, sizes, activation, keep, hopper):
    """Rows are gathered as they are read."""
    make = {"device": hopper, "dtype": torch.bfloat16}
    packed, rows = make_packed(sizes, 99, 3, hopper), sum(sizes)
    x, d_out = normal(99, 192, **make), normal(99, 192, **make)
    up = normal(len(sizes), 2 * 200, 192, scale=0.1, **make)
    down = normal(len(sizes), 192, 200, scale=0.1, **make)
    tile = tile._replace(block_n=tile.block_n // 2)
    pair = (tile, tile._replace(specialize=True))
    expected, got = (
        plain.hidden(x, up, packed, activation=activation, keep=keep, tile=each) for each in pair
    )
    same(got[0], expected[0], rows)
    if not keep:
        return
    pre = expected[1]
    same(got[1], pre, rows)
    gates = torch.rand(99, 3, device=hopper)
    expected, got = (
        plain.hidden_backward(
            d_out,
            down,
            packed,
            pre,
            gates=gates,
            activation=activation,
            tile=each._replace(block_n=2 * each.block_n, step=0),
        )
        for each in pair
    )
    same(got.pre, expected.pre, rows)
    same(got.weighted_h, expected.weighted_h, rows)
    same(got.gate[0], expected.gate[0], rows)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "swiglu_clamped"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_gradient_in_one_kernel(sizes, activation, copy, hopper):
    """Not the bits of two kernels, which round what they hand over, but nearer to float64."""
    make = {"device": hopper, "dtype": torch.bfloat16}
    packed, rows = make_packed(sizes, 99, 3, hopper), sum(sizes)
    d_out, pre = normal(99, 192, **make), normal(rows + 5, 2 * 328, **make)
    down = normal(len(sizes), 192, 328, scale=0.1, **make)
    gates = torch.rand(99, 3, device=hopper)
    tile = Tile(128, 256, 64, 8, 3, tma=True, specialize=True, copy=copy)
    got = plain.hidden_backward(
        d_out, down, packed, pre, gates=gates, activation=activation, tile=tile
    )
    index, choice = packed.arrived_of_packed[:rows].long(), packed.choice_of_packed[:rows].long()
    expert = torch.repeat_interleave(torch.tensor(sizes, device=hopper))
    inputs = pre[:rows].double().requires_grad_()
    gate = gates[index, choice].double().requires_grad_()
    h = getattr(activations, activation)(inputs)
    y = torch.einsum("si,shi->sh", h, down.double()[expert])
    d_inputs, d_gate = torch.autograd.grad(
        (gate[:, None] * y * d_out[index].double()).sum(), (inputs, gate)
    )
    parts = got.gate[:, :rows].sum(0)
    weighted_h = (gate[:, None] * h).detach()
    assert_close(got.pre[:rows], d_inputs, name="d_pre", tolerance=4e-3)
    assert_close(got.weighted_h[:rows], weighted_h, name="weighted h", tolerance=4e-3)
    assert_close(parts, d_gate, name="d_gate", tolerance=1e-4)
    for untouched in (got.pre, got.weighted_h, got.gate.T):
        assert untouched[rows:].isnan().all(), "a row that no expert owns was written"


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_an_activation_without_a_gate_half_goes_elsewhere(activation, device, monkeypatch):
    """There the two halves of a tile are gate and up."""
    asked = []
    monkeypatch.setattr(hopper_kernels, "grouped_gemm", lambda *_, **how: asked.append(how))
    monkeypatch.setattr(hopper_kernels, "architecture", lambda _: "sm_90")
    packed = make_packed((7, 3), 9, 2, device)
    width = 16 if activation == "relu2" else 32
    up = normal(2, width, 64, device=device, dtype=torch.float16)
    x = normal(9, 64, device=device, dtype=torch.float16)
    tile = Tile(16, 16, 16, 4, 2, specialize=True)
    h, _ = plain.hidden(x, up, packed, activation=activation, keep=True, tile=tile)
    assert len(asked) == (activation == "swiglu")
    assert h[:10].isfinite().all() == (activation == "relu2")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_other_gpus_have_no_such_warps(arch, monkeypatch):
    """Their compiler ends the process. A table of tiles may come from elsewhere (EP_MOE_TILES)."""
    monkeypatch.setattr(hopper_kernels, "architecture", lambda _: arch)
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    assert hopper_kernels.serves(x, None, depth=64) == (arch == "sm_90")
    assert not hopper_kernels.serves(x, None, depth=72)
    assert not hopper_kernels.serves(x.float())
    assert not hopper_kernels.serves(x[:, :60].contiguous())


@pytest.mark.parametrize("gathered", [None, "d_y", "x"])
@pytest.mark.parametrize("depth,columns", WIDTHS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES.keys())
def test_weight_gradients(tile, sizes, depth, columns, gathered, hopper):
    make = {"device": hopper, "dtype": torch.bfloat16}
    packed, rows = make_packed(sizes, 99, 3, hopper), sum(sizes)
    operands = {"d_y": normal(rows + 5, depth, **make), "x": normal(rows + 5, columns, **make)}
    for operand in operands.values():
        operand[rows:] = torch.nan
    if gathered:
        operands[gathered] = normal(99, operands[gathered].shape[1], **make)
    expected, got = (
        grouped_wgrad(
            *operands.values(),
            packed.offsets,
            arrived_of_packed=packed.arrived_of_packed if gathered else None,
            gathered=gathered,
            scale=1 / 3,
            tile=each,
        )
        for each in (tile, tile._replace(specialize=True))
    )
    assert torch.equal(got, expected)
    for expert, size in enumerate(sizes):
        assert size or (got[expert] == 0).all()
