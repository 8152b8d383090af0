"""Once per optimizer step: selection biases move, counts start again; nothing counts twice."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import ep_moe
from ep_moe.testing import assert_close, run_ranks
from tests.helpers import small_config

RATE = 0.25
WANTED = [6, 2, 4, 4]  # case BB-61
MOVES = [-RATE, RATE, 0.0, 0.0]


def four_experts(ranks=None, **changes):
    """A layer in which token x = unit vector e wants expert e."""
    sizes = {"hidden_size": 4, "num_experts": 4, "top_k": 1, "renormalize": False}
    config = small_config(**(sizes | {"expert_bias": True} | changes))
    layer = ep_moe.MoELayer(config, **(ranks or {}))
    with torch.no_grad():
        layer.router.weight.copy_(8 * torch.eye(4))
    return layer


def tokens_for(wanted):
    return torch.eye(4)[[e for e, n in enumerate(wanted) for _ in range(n)]]


def hooked(model):
    """The model's optimizer, which moves no weight, so that biases alone change."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return optimizer, ep_moe.balance_hook(model, optimizer, bias_rate=RATE)


def backward(layer, x):
    layer(x)[0].sum().backward()


def bias_after(layer, batches, forward=backward):
    optimizer, _ = hooked(layer)
    for x in batches:
        forward(layer, x)
    optimizer.step()
    assert layer.router.tokens_since_step is None
    return layer.router.expert_bias.tolist()


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 16])
def test_one_update_a_step_however_many_micro_batches(micro_batches):
    """Case BB-61. The whole batch decides: a micro-batch of one token has an opinion of its own."""
    x = tokens_for(WANTED)[torch.randperm(16)]
    assert bias_after(four_experts(), x.chunk(micro_batches)) == MOVES


def test_counts_start_again_after_each_step():
    layer = four_experts()
    optimizer, _ = hooked(layer)
    for wanted, expected in [
        ([9, 1, 1, 1], [-1, 1, 1, 1]),
        ([0, 2, 2, 0], [0, 0, 0, 2]),
        ([3, 3, 3, 3], [0, 0, 0, 2]),
    ]:
        backward(layer, tokens_for(wanted))
        optimizer.step()
        assert layer.router.expert_bias.tolist() == [RATE * b for b in expected]
    optimizer.step()  # with no forward pass before it
    assert layer.router.expert_bias.tolist() == [0, 0, 0, 2 * RATE]


def test_the_bias_evens_out_the_load():
    """Sigmoid scores near 1/2, one expert liked by all: after some steps all four work."""
    layer = four_experts(scoring_func="sigmoid")
    with torch.no_grad():
        layer.router.weight.copy_(torch.randn(4, 4) / 4)
        layer.router.weight[2] += 0.5
    x = torch.rand(64, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    ep_moe.balance_hook(layer, optimizer, bias_rate=0.01)
    load = []
    for _ in range(60):
        y, stats = layer(x)
        y.sum().backward()
        optimizer.step()
        load.append(ep_moe.max_vio(stats.tokens_per_expert).item())
    assert load[0] == 3.0
    assert max(load[-10:]) < 0.5


def not_training(layer, x):
    _, stats = layer.eval()(x)
    layer.train()
    return stats


@torch.no_grad()
def without_gradients(layer, x):
    return layer(x)[1]


@pytest.mark.parametrize("forward", [not_training, without_gradients])
def test_evaluation_does_not_count(forward):
    assert bias_after(four_experts(), [tokens_for(WANTED)], forward) == [0.0] * 4


@pytest.mark.parametrize("context", [{}, {"context_fn": ep_moe.replay()}], ids=["plain", "replay"])
@pytest.mark.parametrize("nested", [False, True])
def test_recomputation_does_not_count(nested, context):
    """Of two micro-batches one is checkpointed; were its tokens counted twice, 6 4 4 4 would move
    the last two experts, too."""
    layer = four_experts()
    optimizer, _ = hooked(layer)

    def block(x):
        return layer(x)[0]

    def outer(x):
        return checkpoint(block, x, use_reentrant=False, **context)

    x = tokens_for([0, 2, 0, 0])
    y = checkpoint(outer if nested else block, x, use_reentrant=False, **context)
    y.sum().backward()
    backward(layer, tokens_for([6, 0, 4, 4]))
    optimizer.step()
    assert layer.router.expert_bias.tolist() == MOVES


def test_layers_without_a_bias_stop_no_other():
    """Case BB-61, its second report: one layer without balancing ended the updates of all later
    ones."""
    model = nn.ModuleList([four_experts(), four_experts(expert_bias=False), four_experts()])
    optimizer, _ = hooked(model)
    for layer in model:
        backward(layer, tokens_for(WANTED))
    optimizer.step()
    assert [layer.router.tokens_since_step for layer in model] == [None] * 3
    assert model[1].router.expert_bias is None
    for layer in (model[0], model[2]):
        assert layer.router.expert_bias.tolist() == MOVES


def test_each_layer_has_counts_of_its_own():
    model = nn.ModuleList([four_experts(), four_experts()])
    optimizer, _ = hooked(model)
    backward(model[0], tokens_for(WANTED))
    backward(model[1], tokens_for(WANTED[::-1]))
    optimizer.step()
    assert model[0].router.expert_bias.tolist() == MOVES
    assert model[1].router.expert_bias.tolist() == MOVES[::-1]


def test_a_removed_hook_leaves_nothing_behind():
    """No update, and no counts that pile up and enter the global loss."""
    layer = four_experts(aux_loss_scope="global", aux_loss_coef=1.0)
    expected = layer(tokens_for(WANTED))[1].aux_loss
    optimizer, hook = hooked(layer)
    backward(layer, tokens_for([9, 1, 1, 1]))
    hook.remove()
    assert torch.equal(layer(tokens_for(WANTED))[1].aux_loss, expected)
    optimizer.step()
    assert layer.router.tokens_since_step is None
    assert layer.router.expert_bias.tolist() == [0.0] * 4


@pytest.mark.parametrize("convert", [nn.Module.bfloat16, nn.Module.half])
def test_the_bias_of_a_converted_model_moves_in_fp32(convert):
    """Case BB-61/c: in bf16 1 + .001 is 1, and balance stands still. Converted before the hook or
    after it."""
    layer = four_experts()
    layer.router.expert_bias.fill_(1.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    ep_moe.balance_hook(layer, optimizer, bias_rate=0.001)
    convert(layer)
    backward(layer, tokens_for(WANTED).to(layer.router.weight.dtype))
    optimizer.step()
    bias, right = layer.router.expert_bias, torch.tensor([0.999, 1.001, 1.0, 1.0])
    assert bias.dtype == torch.float32
    assert_close(bias, right, name="bias")
    with pytest.raises(AssertionError):
        assert_close(torch.ones(4), right, name="bias")


def test_the_optimizer_and_its_state_do_not_know_the_bias():
    """It has no gradient; the hook is what moves it."""
    layer = four_experts()
    optimizer = torch.optim.AdamW(layer.parameters())
    ep_moe.balance_hook(layer, optimizer)
    backward(layer, tokens_for(WANTED))
    optimizer.step()
    assert layer.router.expert_bias.tolist() == pytest.approx([-0.001, 0.001, 0.0, 0.0])
    assert not layer.router.expert_bias.requires_grad
    assert len(optimizer.state) == len(list(layer.parameters()))


def global_loss(p, n, counted_tokens, top_k=1):
    """alpha = 1: E / (K T_n T_p) sum_i n_i sum_t p_ti, token by token."""
    tokens, num_experts = p.shape
    total = sum(n[e] * p[t, e] for e in range(num_experts) for t in range(tokens))
    return total * num_experts / (top_k * counted_tokens * max(tokens, 1))


def test_global_loss_sees_the_accumulation_steps_so_far():
    """n of all micro-batches since the last step, p of this one; after the step from the start."""
    layer = four_experts(expert_bias=False, aux_loss_scope="global", aux_loss_coef=1.0).double()
    optimizer, _ = hooked(layer)
    for _ in range(2):
        n = torch.zeros(4, dtype=torch.int64)
        for wanted in ([6, 0, 0, 0], [0, 1, 2, 0], [3, 3, 1, 1]):
            x = tokens_for(wanted).double()
            _, stats = layer(x)
            n += torch.tensor(wanted)
            p = (8 * x).softmax(1)
            expected = global_loss(p, n.tolist(), n.sum().item())
            assert_close(stats.aux_loss, expected, name="loss")
        optimizer.step()


@pytest.mark.parametrize("evaluate", [not_training, without_gradients])
def test_evaluation_between_micro_batches_reports_its_own_balance(evaluate):
    layer = four_experts(expert_bias=False, aux_loss_scope="global", aux_loss_coef=1.0)
    expected = layer(tokens_for(WANTED))[1].aux_loss
    hooked(layer)
    backward(layer, tokens_for([9, 1, 1, 1]))
    assert torch.equal(evaluate(layer, tokens_for(WANTED)).aux_loss, expected)


SHARES = {  # for each of two ranks, what the tokens of each micro-batch want
    "even": [[[3, 1, 2, 2]], [[3, 1, 2, 2]]],
    "each rank has another view": [[[6, 0, 0, 0]], [[0, 2, 4, 4]]],
    "one rank has no tokens": [[[6, 2, 4, 4]], [[0, 0, 0, 0]]],
    "micro-batches": [[[6, 0, 0, 0], [0, 0, 1, 0]], [[0, 1, 0, 4], [0, 1, 3, 0]]],
    "no tokens anywhere": [[[0, 0, 0, 0]], [[0, 0, 0, 0]]],
}


def rank_biases(rank):
    """For experts spread over the ranks, and for all of them on each rank with a wider balance."""
    group = dist.group.WORLD
    got = {}
    for name, shares in SHARES.items():
        for where in ("ep", "balance_over"):
            layer = four_experts({where: group})
            batches = [tokens_for(wanted) for wanted in shares[rank]]
            got[name, where] = bias_after(layer, batches)
    return got


@pytest.fixture(scope="module")
def biases():
    return run_ranks(rank_biases, 2)


@pytest.mark.parametrize("where", ["ep", "balance_over"])
@pytest.mark.parametrize("name", SHARES)
def test_all_ranks_move_alike(name, where, biases):
    """By the counts of all of them."""
    expected = [0.0] * 4 if name == "no tokens anywhere" else MOVES
    assert [rank[name, where] for rank in biases] == [expected] * 2


def rank_bias_on_a_mesh(rank):
    """Rank 3 alone wants what makes the counts WANTED."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    mine = tokens_for([[3, 0, 0, 0], [3, 0, 0, 0], [0, 0, 4, 0], [0, 2, 0, 4]][rank])
    return [
        bias_after(four_experts(ranks), [mine])
        for ranks in (
            {"ep": mesh},
            {"balance_over": mesh},
            {"ep": mesh["dp"], "balance_over": mesh},
        )
    ]


def test_all_ranks_of_a_mesh_move_alike():
    """Replicas of the experts too: by the counts of its own row each pair would go its own way."""
    assert run_ranks(rank_bias_on_a_mesh, 4) == [[MOVES] * 3] * 4
