"""The whole expert MLP on the kernels, also where there is no GPU: the interpreter runs them."""

import sys

import pytest
import torch

from ep_moe import ops
from ep_moe.kernels import choice
from ep_moe.kernels import pack as pack_kernel
from ep_moe.kernels.device import leaving
from ep_moe.types import Packed
from tests.helpers import small_config
from tests.kernels.cases import TILES
from tests.test_experts import compare, make_arrived, make_experts
from tests.test_experts_in_parts import same

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture
def kernels(monkeypatch):
    """Buffers have room for all pairs that there might be."""

    def pack(local_ids, num_experts, max_packed=None):
        arrived, choice, packed, offsets = pack_kernel.pack(local_ids, num_experts)
        return Packed(
            arrived_of_packed=arrived,
            choice_of_packed=choice,
            packed_of_arrived=packed,
            offsets=offsets,
        )

    monkeypatch.setattr(ops, "pack", pack)
    use_kernels(monkeypatch)


def use_kernels(monkeypatch):
    """Every op takes its kernel, on a CPU too."""
    for name in ("gather", "grouped_gemm", "hidden", "weighted_sum"):
        module = sys.modules[f"ep_moe.ops.{name}"]
        monkeypatch.setattr(module, "served_by_kernel", lambda x: x.dtype != torch.float64)


@pytest.mark.parametrize("keep", ["pre_activation", "rows"])
@pytest.mark.parametrize("gate_on", ["output", "input"])
@pytest.mark.parametrize("mlp_bias", [False, True])
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_equals_the_loop(activation, mlp_bias, gate_on, keep, kernels, device):
    config = small_config(
        activation=activation,
        mlp_bias=mlp_bias,
        gate_on=gate_on,
        num_experts=5,
        top_k=3,
        experts_keep=keep,
    )
    experts = make_experts(config, torch.float32, device)
    arrived = make_arrived(21, config, torch.float32, device)
    compare(experts, arrived, torch.randn(21, 16, device=device))


@pytest.mark.parametrize(
    "rows,absent",
    [(0, 0.0), (6, 1.0), (1, 0.0), (33, 0.9)],
    ids=["no rows", "no row has an expert here", "one row", "most absent"],
)
@pytest.mark.parametrize("gate_on", ["output", "input"])
def test_few_rows(gate_on, rows, absent, kernels, device):
    config = small_config(mlp_bias=True, gate_on=gate_on)
    arrived = make_arrived(rows, config, torch.float32, device, absent=absent)
    compare(
        make_experts(config, torch.float32, device),
        arrived,
        torch.randn(rows, 16, device=device),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gate_on", ["output", "input"])
@pytest.mark.parametrize("absent", [0.0, 0.4, 1.0])
def test_parts_equal_the_whole(absent, gate_on, dtype, kernels, device):
    """Each part's buffers have room of their own, in the middle of what is then one."""
    config = small_config(mlp_bias=True, gate_on=gate_on, num_experts=5, top_k=3)
    arrived = make_arrived(21, config, dtype, device, absent=absent)
    d_out = torch.randn(21, 16, device=device, dtype=dtype)
    same(make_experts(config, dtype, device), arrived, (8, 0, 13), d_out)


@pytest.mark.parametrize("sms", [1, 1000])
def test_fewer_programs_give_the_same_bits(sms, kernels, device):
    """Forward, and the backward that follows it elsewhere."""
    config, found = small_config(mlp_bias=True), []
    arrived = make_arrived(40, config, torch.float32, device)
    experts = make_experts(config, torch.float32, device)
    for left in (0, sms):
        with leaving(left):
            out = experts(arrived)
        found.append([out, *torch.autograd.grad(out.square().sum(), list(experts.parameters()))])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_exact_asks_for_tiles_that_do_not_depend_on_the_rows(
    numerics, kernels, device, monkeypatch
):
    """Every product, forward and backward."""
    asked = []

    def tile_for(product, arch, *, exact):
        asked.append((product.form, exact))
        return TILES["pointers"]

    monkeypatch.setattr(choice, "tile_for", tile_for)
    config = small_config(numerics=numerics)
    arrived = make_arrived(9, config, torch.float32, device)
    make_experts(config, torch.float32, device)(arrived).sum().backward()
    forms = ["hidden", "product", "gradient", "wgrad", "wgrad", "dgrad"]
    assert asked == [(form, numerics == "exact") for form in forms]


@pytest.mark.parametrize("gate_on", ["output", "input"])
def test_rows_that_no_kernel_serves_in_buffers_with_room(gate_on, kernels, device):
    """float64 on a GPU: the index comes from a kernel, with a tail that no expert owns, and torch
    does the rest."""
    config = small_config(mlp_bias=True, gate_on=gate_on)
    arrived = make_arrived(21, config, torch.float64, device, absent=0.5)
    d_out = torch.randn(21, 16, dtype=torch.float64, device=device)
    compare(make_experts(config, torch.float64, device), arrived, d_out)
