"""The balance losses over ranks and micro-batches: their mean is the loss of the whole batch, and
so is the mean of the router's gradients."""

from functools import cache
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ep_moe import MoEConfig, MoELayer, total_aux
from ep_moe.testing import assert_close, run_ranks
from tests.helpers import small_config

LENGTH, HIDDEN = 5, 16
WORLD_SIZES = (2, 4)
SHARES = {  # sequences of each rank; two ranks take the first two numbers and then the rest
    "even": (2, 2, 2, 2),
    "uneven": (1, 4, 0, 3),
    "one rank has all": (0, 8, 0, 0),
    "nobody has any": (0, 0, 0, 0),
}
SCOPES = ("micro_batch", "sequence", "global")
# Scope, shares, padded, and which ranks: those of the experts, or a wider group; of a mesh all.
MESHES = ("ep of a mesh", "a mesh of two", "a mesh of three")
CELLS = [
    *product(SCOPES[1:], SHARES, (False, True), ("ep", "balance_over")),
    *product(
        SCOPES[1:], ("uneven",), (True,), ("ep of a mesh", "a mesh of two", "a mesh of three")
    ),
]


def shares_of(name, world_size):
    each = SHARES[name]
    return {1: (sum(each),), 2: (sum(each[:2]), sum(each[2:])), 4: each}[world_size]


def layer_of(scope, ranks=None):
    torch.manual_seed(0)  # all ranks and one process draw the same weights
    config = small_config(aux_loss_scope=scope, aux_loss_coef=0.1)
    return MoELayer(config, **(ranks or {})).double()


def batch_of(sequences, padded):
    """Each sequence prefers other experts; its padding is at the end of some, and all of one."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sequences, LENGTH, HIDDEN, generator=generator, dtype=torch.float64)
    x += 2 * torch.randn(sequences, 1, HIDDEN, generator=generator, dtype=torch.float64)
    tokens = torch.tensor([5, 3, 5, 0, 2, 5, 1, 4])[:sequences, None]
    return x, torch.arange(LENGTH) >= tokens if padded else None


def aux_of(layer, x, mask, micro_batches=1):
    """Mean over micro-batches of the loss, and the router's gradient of that mean."""
    masks = [None] * micro_batches if mask is None else mask.tensor_split(micro_batches)
    losses = []
    for part, m in zip(x.tensor_split(micro_batches), masks, strict=True):
        y, stats = layer(part, m)
        losses.append(total_aux([stats]) + 0 * y.sum())
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.detach(), layer.router.weight.grad


def rank_aux(rank, world_size):
    """Every cell in one go: starting ranks costs more than the losses."""
    got = {}
    rest = world_size // 2
    mesh = init_device_mesh("cpu", (rest, 2), mesh_dim_names=("dp", "ep"))
    three = init_device_mesh("cpu", (rest, 1, 2))
    ranks_of = {
        "ep": {"ep": dist.group.WORLD},
        "balance_over": {"balance_over": dist.group.WORLD},
        "ep of a mesh": {"ep": mesh},
        "a mesh of two": {"ep": mesh["ep"], "balance_over": mesh},
        "a mesh of three": {"balance_over": three},
    }
    for scope, name, padded, where in CELLS:
        shares = shares_of(name, world_size)
        x, mask = batch_of(sum(shares), padded)
        mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
        layer = layer_of(scope, ranks_of[where])
        got[scope, name, padded, where] = aux_of(
            layer, x[mine], None if mask is None else mask[mine]
        )
    for micro_batches in (1, 2, 4):
        for scope in SCOPES:
            ranks = {"ep": dist.group.WORLD if world_size == 2 else None}
            ranks = ranks | {"balance_over": dist.group.WORLD}
            got["BB-59", scope, micro_batches] = two_experts(scope, ranks, micro_batches)
        x, _ = batch_of(16, False)
        mine = x.tensor_split(world_size)[rank]
        layer = layer_of("sequence", {"ep": dist.group.WORLD})
        got["micro-batches", micro_batches] = aux_of(layer, mine, None, micro_batches)
    return got


@cache
def on_ranks(world_size):
    """The mean over ranks of every cell's loss and gradient."""
    if world_size == 1:
        return {}
    ranks = run_ranks(rank_aux, world_size, world_size)
    return {
        cell: [
            torch.stack(values).mean(0) for values in zip(*(r[cell] for r in ranks), strict=True)
        ]
        for cell in ranks[0]
    }


def check(got, expected):
    for name, a, b in zip(("loss", "gradient of the router"), got, expected, strict=True):
        assert_close(a, b, name=name)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("scope,shares,padded,where", CELLS)
def test_mean_over_ranks_is_the_loss_of_the_batch(scope, shares, padded, where, world_size):
    """However the sequences are spread, and with ranks that have none."""
    x, mask = batch_of(sum(SHARES[shares]), padded)
    got = on_ranks(world_size)[scope, shares, padded, where]
    expected = aux_of(layer_of(scope), x, mask)
    check(got, expected)
    assert (got[0] > 0) == (len(x) > 0)


def test_the_scopes_differ_here():
    """Or these tests would not see that one is taken for another."""
    x, _ = batch_of(8, False)
    losses = [aux_of(layer_of(scope), x, None)[0].item() for scope in ("sequence", "global")]
    first_half = aux_of(layer_of("global"), x[:4], None)[0].item()
    assert max(losses) > 1.2 * min(losses)
    assert abs(first_half - losses[1]) > 0.05 * losses[1]


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("world_size", [1, *WORLD_SIZES])
def test_sequence_scope_depends_on_neither_ranks_nor_micro_batches(world_size, micro_batches):
    """Case BB-59, its kind: router gradients across splits of one batch."""
    x, _ = batch_of(16, False)
    if world_size == 1:
        got = aux_of(layer_of("sequence"), x, None, micro_batches)
    else:
        got = on_ranks(world_size)["micro-batches", micro_batches]
    check(got, aux_of(layer_of("sequence"), x, None))


def two_experts(scope, ranks, micro_batches):
    """Logits (ln 4, 0) for every token, coefficient .01: the router's weight is the logits."""
    config = MoEConfig(
        hidden_size=1,
        intermediate_size=1,
        num_experts=2,
        top_k=1,
        renormalize=False,
        aux_loss_coef=0.01,
        aux_loss_scope=scope,
    )
    layer = MoELayer(config, **ranks).double()
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[4.0], [1.0]]).double().log())
    return aux_of(layer, torch.ones(4, 1, 1, dtype=torch.float64), None, micro_batches)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("world_size", [1, *WORLD_SIZES])
@pytest.mark.parametrize("scope", SCOPES)
def test_gradient_in_worked_numbers(scope, world_size, micro_batches):
    """Case BB-59: thrown away it is 0, without its coefficient .32, summed over micro-batches
    .0128; and it does not shrink with the number of ranks."""
    if world_size == 1:
        got = two_experts(scope, {}, micro_batches)
    else:
        got = on_ranks(world_size)["BB-59", scope, micro_batches]
    right = torch.tensor([[0.0032], [-0.0032]], dtype=torch.float64)
    check(got, (torch.tensor(0.016, dtype=torch.float64), right))
    for wrong in (0.0128, 0.0, 0.32, 0.0032 / 2, 0.0032 / 4):
        with pytest.raises(AssertionError):
            assert_close(right * (wrong / 0.0032), right, name="gradient of the router")
