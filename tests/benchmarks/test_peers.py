import pytest
import torch

import ep_moe
from benchmarks import peers
from benchmarks.peers import PEERS, Unavailable, largest_error


def build(name, layer):
    try:
        return PEERS[name](layer.config, layer.experts)
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_computes_what_we_do(name):
    torch.manual_seed(0)
    config = ep_moe.MoEConfig(hidden_size=32, intermediate_size=16, num_experts=16, top_k=3)
    layer = ep_moe.MoELayer(config)
    peer = build(name, layer)
    x, d_y = torch.randn(2, 4, 32)  # 12 choices of 16 experts: some are empty
    x.requires_grad_()
    ids = layer.router(x, None)[0].ids
    gates = torch.rand(4, 3, requires_grad=True)
    leaves = (x, gates, layer.experts.w_gate_up, layer.experts.w_down)

    def outputs(y):
        return y, *torch.autograd.grad(y, leaves, d_y)

    ours = outputs(ep_moe.moe(x, ep_moe.Routing(ids, gates), layer.experts, layer.transport))
    theirs = outputs(peer.run(x, ids.to(peer.ids_dtype), gates.to(peer.gate_dtype)))
    assert largest_error(theirs, ours) < 1e-5


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


def test_the_error_of_the_worst_pair_counts_and_nan_is_never_below_a_limit():
    one, off = torch.ones(4), torch.full((4,), 1.5)
    assert largest_error((one, off), (one, one)) == 0.5
    assert not largest_error(one * float("nan"), one) <= peers.error_limit(torch.bfloat16)
