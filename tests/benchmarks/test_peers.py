import pytest
import torch

import ep_moe
from benchmarks import peers
from benchmarks.peers import PEERS, Unavailable, largest_error, peer
from benchmarks.peers.peer import halves, interleaved


def build(name, layer):
    try:
        return PEERS[name](layer.config, layer.experts)
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [4, 100])
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_computes_what_we_do(name, tokens, dtype, device):
    config = ep_moe.MoEConfig(hidden_size=256, intermediate_size=128, num_experts=16, top_k=2)
    layer = ep_moe.MoELayer(config).to(device, dtype)
    peer = build(name, layer)
    x, d_y = torch.randn(2, tokens, config.hidden_size, device=device).to(dtype)
    x.requires_grad_()
    ids = layer.router(x, None)[0].ids  # 8 choices leave experts without a row
    gates = torch.rand(tokens, 2, device=device, requires_grad=True)

    def outputs(run, weights):
        with torch.no_grad():
            y = run()
        if not peer.trains:
            return (y,)
        leaves = (x, gates, *(weights or (layer.experts.w_gate_up, layer.experts.w_down)))
        return y, *torch.autograd.grad(run(), leaves, d_y)

    def our_moe():
        return ep_moe.moe(x, ep_moe.Routing(ids, gates), layer.experts, layer.transport)

    def their_moe():
        return peer.run(x, ids.to(peer.ids_dtype), gates.to(peer.gate_dtype))

    ours, (y, *gradients) = outputs(our_moe, None), outputs(their_moe, peer.weights)
    if peer.trains:
        gradients[2:] = peer.ours(*gradients[2:])
    limit = 1e-5 if dtype == torch.float32 else peers.error_limit(dtype)
    assert largest_error((y, *gradients), ours) < limit


def test_gate_and_up_rows_interleaved_and_apart():
    rows = torch.tensor([[[0.0], [1.0], [2.0], [10.0], [11.0], [12.0]]])
    mixed = interleaved(rows)
    assert mixed.flatten().tolist() == [0, 10, 1, 11, 2, 12]
    assert torch.equal(halves(mixed), rows)


@pytest.mark.parametrize("field", [{"mlp_bias": True}, {"activation": "swiglu_clamped"}])
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_of_another_formula_is_refused(name, field):
    config = ep_moe.MoEConfig(hidden_size=32, intermediate_size=16, num_experts=4, top_k=1, **field)
    with pytest.raises(Unavailable, match="SwiGLU experts without biases"):
        PEERS[name](config, ep_moe.MoELayer(config).experts)


def test_the_transformers_peer_runs_the_implementation_in_its_name():
    config = ep_moe.MoEConfig(hidden_size=32, intermediate_size=16, num_experts=4, top_k=1)
    module = build("transformers_grouped_mm", ep_moe.MoELayer(config)).run
    assert module.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("part", [1, 3, 4])
def test_the_error_of_the_worst_pair_counts_and_nan_is_never_below_a_limit(part, monkeypatch):
    monkeypatch.setattr(peer, "_PART", part)
    one, off = torch.ones(4), torch.full((4,), 1.5)
    assert largest_error((one, off), (one, one)) == 0.5
    assert largest_error(torch.tensor([1.0, 1, 1, 5]), one) == 2
    assert largest_error((0 * one, one), (0 * one, one)) == 0
    assert largest_error(one, 0 * one) > 1e9
    assert not largest_error(one * float("nan"), one) <= peers.error_limit(torch.bfloat16)
