"""Hugging Face's own blocks as independent oracles, of our layer and of our oracle.

Same weights, then the same ids and gate weights, the same output, and the same gradient of every
parameter and of x. Most of their routers compute in float32 even in a float64 block, so a whole
layer cannot be compared sharper than that; with the routing given it can.
"""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ep_moe import MoEConfig, MoELayer, Routing, moe, oracle
from ep_moe.testing import TOLERANCE, assert_close
from tests.families.table import FAMILIES

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
T = 34


class Outcome(NamedTuple):
    y: Tensor  # (T,H)
    ids: Tensor  # (T,K)
    gate_weights: Tensor  # (T,K)


def run(block, x, routing=None):
    """Their block on x (T,H) as two sequences, and what its router chose, or what it is made to."""
    router = block.gate if hasattr(block, "gate") else block.router
    chosen = []

    def hook(module, args, out):
        if len(out) == 3:
            logits, gate_weights, ids = out
        else:  # Llama-4: scores (T,E), 0 where not chosen
            scores, logits = out
            gate_weights, ids = scores.topk(router.top_k, dim=1)
        chosen.extend([ids, gate_weights])
        if routing is None:
            return None
        ids, gate_weights = vars(routing).values()
        if len(out) == 3:
            return logits, gate_weights, ids
        return torch.zeros_like(scores).scatter(1, ids, gate_weights), logits

    with router.register_forward_hook(hook):
        out = block(x.view(2, -1, x.shape[1]))
    y = out[0] if isinstance(out, tuple) else out  # the others: router scores or logits
    return Outcome(y.reshape(x.shape), *chosen)


def by_id(ids, gate_weights):
    """Nobody promises the order of a token's choices."""
    ids, order = ids.sort(dim=1)
    return {"ids": ids, "gate weights": gate_weights.gather(1, order)}


def results(y, d_y, x, parameters):
    """y, and the gradients of x and of the parameters by name."""
    found = torch.autograd.grad(y, [x, *parameters.values()], d_y)
    return {"y": y, "x": found[0]} | dict(zip(parameters, found[1:], strict=True))


def of_block(family, block, x, d_y):
    x = x.clone().requires_grad_()
    y, ids, gate_weights = run(block, x)
    found = results(y, d_y, x, dict(block.named_parameters()))
    gradients = family.as_ours(found, but=("router.expert_bias",))  # it has none
    return by_id(ids, gate_weights) | {"y": y, "x": found["x"]} | gradients


def of_layer(config, weights, x, d_y):
    x, layer = x.clone().requires_grad_(), loaded(config, weights, x.dtype)
    routing, _ = layer.router(x, None)
    y, _ = layer(x)
    return by_id(*vars(routing).values()) | results(y, d_y, x, dict(layer.named_parameters()))


def of_exact_layer(config, weights, x, d_y):
    return of_layer(replace(config, numerics="exact"), weights, x, d_y)


def of_oracle(config, weights, x, d_y):
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    bias, x = leaves.pop("router.expert_bias", None), x.clone().requires_grad_()
    buffer = {} if bias is None else {"router.expert_bias": bias}
    logits = x @ leaves["router.weight"].t() + leaves.get("router.bias", 0.0)
    routing = oracle.route(logits, config, bias)
    y = oracle.moe_layer(x, leaves | buffer, config)
    return by_id(*vars(routing).values()) | results(y, d_y, x, leaves)


def loaded(config: MoEConfig, weights, dtype: torch.dtype) -> MoELayer:
    layer = MoELayer(config).to(dtype)
    layer.load_state_dict(weights)
    return layer


def compare(got, expected, tolerance):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if name == "ids":
            assert torch.equal(got[name].long(), value), name
        else:
            assert_close(got[name], value, name=name, tolerance=tolerance)


def in_dtype(block, dtype):
    """Their checkpoints keep the selection bias in float32 whatever the rest is in."""
    block = block.to(dtype)
    for buffer in block.buffers():
        buffer.data = buffer.data.float()
    return block


def random_tokens(config, dtype):
    x, d_y = torch.randn(2, T, config.hidden_size).to(dtype)
    return x, d_y


@pytest.mark.parametrize(
    "subject,dtype",
    [
        pytest.param(of_layer, torch.float64, id="layer, float64"),
        pytest.param(of_layer, torch.float32, id="layer, float32"),
        pytest.param(of_exact_layer, torch.float64, id="layer, exact numerics"),
        pytest.param(of_oracle, torch.float64, id="oracle"),
    ],
)
@EVERY_FAMILY
def test_equals_the_block(family, subject, dtype):
    config, block = family.moe_config(), in_dtype(family.random_block(), dtype)
    x, d_y = random_tokens(config, dtype)
    expected = of_block(family, block, x, d_y)
    got = subject(config, family.as_ours(block.state_dict()), x, d_y)
    compare(got, expected, tolerance=5e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@EVERY_FAMILY
def test_equals_the_block_with_the_routing_given(family, dtype):
    """`moe` and the shared experts, with no rounding of a router in between."""
    config, block = family.moe_config(), in_dtype(family.random_block(), dtype)
    x, d_y = random_tokens(config, dtype)
    _, ids, gates = run(block, x)
    gates = gates.detach().double() if dtype == torch.float64 else gates.detach()
    layer = loaded(config, family.as_ours(block.state_dict()), dtype)

    theirs, their_gates = x.clone().requires_grad_(), gates.clone().requires_grad_()
    y, *_ = run(block, theirs, Routing(ids, their_gates))
    named = {n: p for n, p in block.named_parameters() if not n.startswith(("gate.", "router."))}
    found = results(y, d_y, theirs, {"gate weights": their_gates} | named)
    expected = family.as_ours(found, but=("router.",))
    expected |= {name: found[name] for name in ("y", "x", "gate weights")}

    x.requires_grad_()
    gates = gates.to(torch.promote_types(gates.dtype, torch.float32)).requires_grad_()
    y = moe(x, Routing(ids, gates), layer.experts, layer.transport)
    if layer.shared_experts is not None:
        y = y + layer.shared_experts(x)
    named = {n: p for n, p in layer.named_parameters() if not n.startswith("router.")}
    got = results(y, d_y, x, {"gate weights": gates} | named)
    compare(got, expected, TOLERANCE[dtype])


@EVERY_FAMILY
def test_routes_bfloat16_tokens_like_their_float32_router(family):
    """Which theirs, in bfloat16, mostly follows: where it chooses alike, it weighs alike."""
    config, block = family.moe_config(), in_dtype(family.random_block(), torch.bfloat16)
    x, _ = random_tokens(config, torch.bfloat16)
    routing, _ = loaded(config, family.as_ours(block.state_dict()), x.dtype).router(x, None)
    got = by_id(*vars(routing).values())
    with torch.no_grad():
        rounded = by_id(*run(block, x)[1:])
        exact = by_id(*run(block.float(), x.float())[1:])
    compare(got, exact, tolerance=TOLERANCE[torch.float32])

    alike = (rounded["ids"] == exact["ids"]).all(dim=1)
    assert alike.float().mean() >= 0.9
    weights = rounded["gate weights"][alike].float()
    assert_close(weights, exact["gate weights"][alike], name="gate weights", tolerance=2e-2)


@pytest.mark.parametrize("width", [16, 8], ids=["H = I", "H = 2I"])
@EVERY_FAMILY
def test_square_matrices_are_told_by_name(family, width):
    """Case BB-39: each matrix that fits either way round is the right one, and the comparison sees
    it when it is not."""
    config = family.moe_config(intermediate_size=width)
    block = in_dtype(family.random_block(intermediate_size=width), torch.float64)
    x, d_y = random_tokens(config, torch.float64)
    expected = of_block(family, block, x, d_y)
    weights = family.as_ours(block.state_dict())
    compare(of_layer(config, weights, x, d_y), expected, tolerance=5e-6)
    square = [n for n, w in weights.items() if w.ndim > 1 and w.shape[-1] == w.shape[-2]]
    assert square or config.activation == "relu2"  # no gate half: nothing is 2I wide
    for name in square:
        turned = of_layer(config, weights | {name: weights[name].mT}, x, d_y)
        with pytest.raises(AssertionError, match="y: off by"):
            assert_close(turned["y"], expected["y"], name="y", tolerance=5e-6)
