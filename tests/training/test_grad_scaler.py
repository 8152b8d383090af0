"""fp16 with a gradient scaler: each rank sees the gradients of its own experts alone, and all must
skip the same steps."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

import ep_moe
from ep_moe.testing import assert_close, run_ranks

CONFIG = ep_moe.MoEConfig(
    hidden_size=16,
    intermediate_size=12,
    num_experts=4,
    top_k=1,
    renormalize=False,
    aux_loss_coef=0.01,
)
TOKENS, SCALE, MAX_NORM = 64, 2.0**18, 0.5


def build(ep):
    """Expert 0, on rank 0, is wanted by all tokens: its weight gradients are sums over all of
    them."""
    torch.manual_seed(0)
    layer = ep_moe.MoELayer(CONFIG, ep=ep)
    with torch.no_grad():
        layer.router.weight[:, -1] = torch.tensor([4.0, 0.0, 0.0, 0.0])
    return layer


def batch(rank):
    x = torch.randn(TOKENS, 16, generator=torch.Generator().manual_seed(rank))
    x[:, -1] = 1.0
    return x


def step(model, layer, shares, scaler, optimizer):
    """One step on the mean of the shares' losses, in fp16 where the scaler is enabled: the norm of
    its gradients, and the weights, the scale and which gradients were not finite."""
    optimizer.zero_grad()
    losses = []
    for x in shares:
        with torch.autocast("cpu", dtype=torch.float16, enabled=scaler.is_enabled()):
            y, stats = model(x)
        losses.append(y.float().square().mean() + ep_moe.total_aux([stats]))
    scaler.scale(torch.stack(losses).mean()).backward()
    broken = {n for n, p in layer.named_parameters() if not p.grad.isfinite().all()}
    scaler.unscale_(optimizer)
    norm = ep_moe.clip_grad_norm_(layer, MAX_NORM)
    scaler.step(optimizer)
    scaler.update()
    weights = {n: p.detach().clone() for n, p in layer.named_parameters()}
    return norm, weights, scaler.get_scale(), broken


SCALERS = {"plain": torch.amp.GradScaler, "sharded": ShardedGradScaler}


def rank_steps(rank, kind):
    """The weights before, and two steps on the same tokens; the first overflows."""
    layer = build(dist.group.WORLD)
    before = {n: p.detach().clone() for n, p in layer.named_parameters()}
    model = DistributedDataParallel(ep_moe.ddp_ignore(layer))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = SCALERS[kind]("cpu", init_scale=SCALE)
    return before, [step(model, layer, [batch(rank)], scaler, optimizer) for _ in "ab"]


def test_a_plain_scaler_lets_the_ranks_part():
    """Which is why the test below can fail: one rank skips, the other does not, and what they hold
    copies of is no longer the same."""
    ranks = run_ranks(rank_steps, 2, "plain")
    broken = [steps[0][3] for _, steps in ranks]
    assert broken == [{"experts.w_gate_up"}, set()]
    assert [steps[0][2] for _, steps in ranks] == [SCALE / 2, SCALE]
    routers = [steps[1][1]["router.weight"] for _, steps in ranks]
    assert not torch.equal(*routers)


def test_a_sharded_scaler_skips_on_every_rank():
    """The step that overflows on rank 0 is skipped on both; the next is that of one process, in
    fp32 without a scaler."""
    one = build(None)
    start = {n: p.detach().clone() for n, p in one.named_parameters()}
    optimizer = torch.optim.SGD(one.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    norm, weights, *_ = step(one, one, [batch(0), batch(1)], scaler, optimizer)
    assert norm > MAX_NORM  # so that clipping counts

    ranks = run_ranks(rank_steps, 2, "sharded")
    assert [steps[0][3] for _, steps in ranks] == [{"experts.w_gate_up"}, set()]
    for rank, (before, steps) in enumerate(ranks):
        mine = slice(2 * rank, 2 * rank + 2)
        (_, skipped, *_), (got_norm, stepped, *_) = steps
        assert [scale for _, _, scale, _ in steps] == [SCALE / 2, SCALE / 2]
        assert_close(got_norm, norm, name=f"norm of rank {rank}", tolerance=5e-3)
        for name, value in before.items():
            assert torch.equal(skipped[name], value), name
            whole = weights[name] - start[name]
            whole = whole[mine] if name.startswith("experts.") else whole
            moved = stepped[name] - value
            assert_close(moved, whole, name=f"{name} of rank {rank}", tolerance=5e-3)
    assert torch.equal(*(steps[1][1]["router.weight"] for _, steps in ranks))


def test_the_scaler_must_be_told_a_cpu():
    """Told nothing it would scale nothing there, with a warning."""
    assert ShardedGradScaler("cpu").is_enabled()
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="CUDA is not available"):
            assert not ShardedGradScaler().is_enabled()
