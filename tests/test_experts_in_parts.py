"""Rows that come in parts: the experts' outputs and gradients are those of the whole, and the
weights' are made once."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.utils import prune

from ep_moe import Experts, ops
from ep_moe.testing import TOLERANCE, assert_close
from ep_moe.types import Arrived
from tests.helpers import DTYPES, small_config
from tests.test_experts import GATE_ON, make_arrived, make_experts

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SIZES = [(9, 12), (0, 5, 16), (20, 1), (0, 0), (4, 0), (1, 2, 3, 4, 5, 6)]


def cut(arrived: Arrived, sizes: tuple[int, ...]) -> list[Arrived]:
    columns = (arrived.rows, arrived.gate_weights, arrived.local_ids)
    return [
        replace(arrived, rows=rows, gate_weights=gates, local_ids=ids)
        for rows, gates, ids in zip(*(column.split(sizes) for column in columns), strict=True)
    ]


def in_parts(experts: Experts, arrived: Arrived, sizes: tuple[int, ...]) -> Tensor:
    work = experts.in_parts()
    return torch.cat([work(part) for part in cut(arrived, sizes)])


def named(experts: Experts, arrived: Arrived) -> dict[str, Tensor]:
    return {"rows": arrived.rows, "gates": arrived.gate_weights, **dict(experts.named_parameters())}


def gradients(out: Tensor, leaves: dict[str, Tensor], d_out: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(out, leaves.values(), d_out, retain_graph=True)
    return dict(zip(leaves, found, strict=True))


def same(experts, arrived, sizes, d_out):
    leaves = named(experts, arrived)
    whole, parts = experts(arrived), in_parts(experts, arrived, sizes)
    assert_close(parts, whole, name="out")
    expected = gradients(whole, leaves, d_out)
    for name, got in gradients(parts, leaves, d_out).items():
        assert got.dtype == expected[name].dtype
        # A gate's gradient in fp32 is made of rows in the dtype of x.
        assert_close(got, expected[name], name=name, tolerance=TOLERANCE[parts.dtype])


@GATE_ON
@pytest.mark.parametrize("keep", ["pre_activation", "rows"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_whole(dtype, sizes, keep, gate_on, device):
    config = small_config(mlp_bias=True, gate_on=gate_on, experts_keep=keep, top_k=3)
    experts = make_experts(config, dtype, device)
    arrived = make_arrived(sum(sizes), config, dtype, device)
    same(experts, arrived, sizes, torch.randn(arrived.rows.shape, device=device).to(dtype))


@pytest.mark.parametrize("absent", [0.0, 0.9, 1.0])
def test_few_or_no_choices_live_here(absent, device):
    config = small_config()
    arrived = make_arrived(13, config, device=device, absent=absent)
    d_out = torch.randn(13, 16, dtype=torch.float64, device=device)
    same(make_experts(config, device=device), arrived, (6, 7), d_out)


def test_gradients_of_weights_are_products_over_all_rows(monkeypatch, device):
    """Two, of however many parts, and to the bit those of the whole: in bf16, with whole numbers
    whose sums need more than its 8 bits, a sum of rounded parts is another."""
    config = small_config(activation="relu2", top_k=1, num_experts=2, renormalize=False)
    experts = make_experts(config, torch.bfloat16, device)
    arrived = make_arrived(60, config, torch.bfloat16, device, absent=0.0)
    with torch.no_grad():
        for value in (arrived.rows, *experts.parameters()):
            value.copy_(torch.randint(-1, 2, value.shape))
        arrived.gate_weights.fill_(1.0)
    d_out = torch.randint(-9, 10, (60, 16), device=device).bfloat16()
    weights = dict(experts.named_parameters())
    expected = gradients(experts(arrived), weights, d_out)
    calls = []
    wgrad = ops.grouped_gemm_wgrad
    monkeypatch.setattr(
        ops, "grouped_gemm_wgrad", lambda *a, **k: (calls.append(0), wgrad(*a, **k))[1]
    )
    for sizes in ((30, 30), (17, 0, 20, 23)):
        got = gradients(in_parts(experts, arrived, sizes), weights, d_out)
        assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert len(calls) == 4
    first, second = (
        gradients(experts(part), weights, of)
        for part, of in zip(cut(arrived, (30, 30)), d_out.split(30), strict=True)
    )
    assert all(not torch.equal(first[n] + second[n], expected[n]) for n in weights)


def test_a_backward_may_come_again_and_ask_for_less(device):
    config = small_config(mlp_bias=True)
    experts = make_experts(config, device=device)
    arrived = make_arrived(11, config, device=device)
    leaves, out = named(experts, arrived), in_parts(experts, arrived, (5, 6))
    d_out = torch.randn(11, 16, dtype=torch.float64, device=device)
    expected = gradients(out, leaves, d_out)
    for names in (list(leaves), ["rows"], ["w_down"], ["gates", "b_gate_up"], list(leaves)):
        got = gradients(out, {name: leaves[name] for name in names}, d_out)
        assert all(torch.equal(got[name], expected[name]) for name in names)


def test_a_backward_that_failed_leaves_nothing(device):
    config = small_config()
    experts = make_experts(config, device=device)
    arrived = make_arrived(11, config, device=device)
    work = experts.in_parts()
    first, second = cut(arrived, (5, 6))
    outs = [work(first), work(second)]
    failing, out = [True], torch.cat(outs)
    outs[0].register_hook(lambda d_out: fail() if failing.pop() else None)
    d_out = torch.randn(11, 16, dtype=torch.float64, device=device)
    leaves = named(experts, arrived)
    with pytest.raises(RuntimeError, match="no way"):
        gradients(out, leaves, d_out)
    failing += [False, False]
    got = gradients(out, leaves, d_out)
    for name, value in gradients(experts(arrived), leaves, d_out).items():
        assert_close(got[name], value, name=name)


def fail():
    raise RuntimeError("no way")


def counted(monkeypatch, name):
    """The results of an op, by weak references."""
    results, op = [], getattr(ops, name)

    def counting(*args, **kwargs):
        result = op(*args, **kwargs)
        results.append(weakref.ref(result if isinstance(result, Tensor) else result.pre))
        return result

    monkeypatch.setattr(ops, name, counting)
    return results


def test_frozen_weights_get_nothing(device, monkeypatch):
    """No product is made for them, and of what it would be made of nothing is kept."""
    config = small_config()
    experts = make_experts(config, device=device).requires_grad_(False)
    arrived = make_arrived(11, config, device=device)
    products = counted(monkeypatch, "grouped_gemm_wgrad")
    d_pre = counted(monkeypatch, "hidden_backward")
    out = in_parts(experts, arrived, (5, 6))
    out.sum().backward()
    assert all(parameter.grad is None for parameter in experts.parameters())
    assert arrived.rows.grad is not None
    assert [kept() for kept in d_pre] == [None, None]
    assert not products
    experts.w_down.requires_grad_()
    in_parts(experts, arrived, (5, 6)).sum().backward()
    assert experts.w_down.grad is not None
    assert experts.w_gate_up.grad is None
    assert len(products) == 1


def test_nothing_outlives_the_backward(device, monkeypatch):
    """What a part gave is gone when the products begin, whose results are large."""
    config, held = small_config(), []
    experts = make_experts(config, device=device)
    d_pre, wgrad = counted(monkeypatch, "hidden_backward"), ops.grouped_gemm_wgrad

    def looking(*args, **kwargs):
        held.extend(kept() is not None for kept in d_pre)
        return wgrad(*args, **kwargs)

    monkeypatch.setattr(ops, "grouped_gemm_wgrad", looking)
    out = in_parts(experts, make_arrived(11, config, device=device), (5, 6))
    out.sum().backward(retain_graph=True)
    assert held == [False] * 4
    assert [kept() for kept in d_pre] == [None, None]


def test_a_backward_without_the_weights_leaves_no_cycle(device, monkeypatch):
    """Of what they would be made of, gradients that know how they came about are a part."""
    experts = make_experts(small_config(), device=device)
    arrived = make_arrived(11, experts.config, device=device)
    d_pre = counted(monkeypatch, "hidden_backward")
    out = in_parts(experts, arrived, (5, 6)).square().sum()
    slope = torch.autograd.grad(out, arrived.rows, create_graph=True)
    del out, slope
    gc.collect()
    assert [kept() for kept in d_pre] == [None, None]


def test_hooks_may_set_the_weights(device):
    """As pruning and the older weight norm do, in each call before the first part."""
    config = small_config()
    experts = make_experts(config, device=device)
    prune.random_unstructured(experts, "w_down", amount=0.4)
    arrived = make_arrived(11, config, device=device)
    d_out = torch.randn(11, 16, dtype=torch.float64, device=device)
    for _ in "12":
        same(experts, arrived, (5, 6), d_out)
        with torch.no_grad():
            experts.w_down_orig.mul_(1.5)


def test_weights_changed_before_the_backward_are_an_error(device):
    config = small_config()
    experts = make_experts(config, device=device)
    out = in_parts(experts, make_arrived(11, config, device=device), (5, 6))
    with torch.no_grad():
        experts.w_down.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_autocast_casts_the_weights_once(device, monkeypatch):
    config, casts = small_config(), []
    experts = make_experts(config, torch.float32, device)
    cast = experts._weights
    monkeypatch.setattr(experts, "_weights", lambda dtype: (casts.append(dtype), cast(dtype))[1])
    arrived = make_arrived(12, config, torch.bfloat16, device)
    with torch.autocast(device.type, torch.bfloat16):
        work = experts.in_parts()
        outs = [work(part) for part in cut(arrived, (5, 7))]
        assert casts == [torch.bfloat16]
        whole = experts(arrived)
    d_out = torch.randn(12, 16, device=device).bfloat16()
    leaves = named(experts, arrived)
    for name, value in gradients(whole, leaves, d_out).items():
        got = gradients(torch.cat(outs), leaves, d_out)[name]
        assert got.dtype == value.dtype
        assert_close(got, value, name=name, tolerance=TOLERANCE[torch.bfloat16])
