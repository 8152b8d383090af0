"""What the ranks of the expert-parallel tests run, and the same on one process."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe import MoEConfig, MoELayer, total_aux
from ep_moe.dispatch import Transport
from ep_moe.testing import TOLERANCE, assert_close


@dataclass(frozen=True)
class Case:
    """tokens[r] on rank r. route_to: push every token's logits towards these experts."""

    tokens: tuple[int, ...]
    config: MoEConfig
    route_to: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64
    padding: bool = False
    checkpoint: bool = False
    detached_loss: tuple[int, ...] = field(default=())  # ranks whose loss is y.sum() * 0

    @property
    def world_size(self) -> int:
        return len(self.tokens)


def config(**changes: Any) -> MoEConfig:
    base = MoEConfig(
        hidden_size=16,
        intermediate_size=12,
        num_experts=8,
        top_k=2,
        aux_loss_coef=0.01,
        z_loss_coef=1e-3,
    )
    return replace(base, **changes)


def global_weights(case: Case) -> dict[str, Tensor]:
    """The whole model's weights, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    weights = {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float64) * 0.3
        for name, value in MoELayer(replace(case.config, transport="auto")).state_dict().items()
    }
    if case.route_to:
        # x gets a constant last channel (see inputs), which the router turns into a preference
        weights["router.weight"][:, -1] = 0.0
        weights["router.weight"][list(case.route_to), -1] = 50.0
    return weights


def inputs(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(100 + rank)
    t, h = case.tokens[rank], case.config.hidden_size
    x = torch.randn(t, h, generator=generator, dtype=torch.float64)
    x[:, -1] = 1.0
    target = torch.randn(t, h, generator=generator, dtype=torch.float64)
    mask = torch.rand(t, generator=generator) < 0.3 if case.padding else None
    return x, target, mask


def make_layer(case: Case, ep: Any, device: str = "cpu") -> MoELayer:
    layer = MoELayer(case.config, ep=ep).to(device, case.dtype)
    mine = layer.experts.global_ids
    weights = {
        name: value[mine.start : mine.stop] if name.startswith("experts.") else value
        for name, value in global_weights(case).items()
    }
    layer.load_state_dict(weights)
    return layer


def loss_of(
    layer: MoELayer, case: Case, rank: int, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, x, y): a mean over this rank's tokens, 0 when it has none."""
    x, target, mask = inputs(case, rank)
    x = x.to(device, case.dtype).requires_grad_()
    target = target.to(device, case.dtype)
    mask = None if mask is None else mask.to(device)
    if case.checkpoint:
        # The block ENDS in combine: nothing behind it hides where recomputation stops.
        aux = []

        def block(x: Tensor) -> Tensor:
            y, stats = layer(x, mask)
            aux.append(stats)
            return y

        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        stats = aux[0]
    else:
        y, stats = layer(x, mask)
    if rank in case.detached_loss:
        return y.sum() * 0, x, y
    loss = (y * target).sum(1).sum() / max(len(x), 1) + total_aux([stats])
    return loss, x, y


def expert_parallel(rank: int, case: Case, device: str = "cpu") -> dict[str, Any]:
    """Loss, outputs, gradients (dense ones averaged over ranks, as DDP would) and one SGD step."""
    layer = make_layer(case, dist.group.WORLD, device)
    loss, x, y = loss_of(layer, case, rank, device)
    loss.backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient on rank {rank}"
        if not name.startswith("experts."):
            dist.all_reduce(parameter.grad)
            parameter.grad /= case.world_size
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    return {
        "loss": loss.detach().cpu(),
        "y": y.detach().cpu(),
        "dx": x.grad.cpu(),
        "grads": {n: p.grad.cpu() for n, p in layer.named_parameters()},
        "weights": {n: p.detach().cpu() for n, p in layer.named_parameters()},
    }


def expert_parallel_each(rank: int, cases: list[Case], device: str) -> list[dict[str, Any]]:
    """Many cases in one go: on a GPU, starting the ranks costs more than the cases."""
    return [expert_parallel(rank, case, device) for case in cases]


def one_process(case: Case, device: str = "cpu") -> dict[str, Any]:
    """The same model on the mean of the per-rank losses, all experts in one place."""
    layer = make_layer(case, None, device)
    losses, xs, ys = zip(
        *(loss_of(layer, case, rank, device) for rank in range(case.world_size)), strict=True
    )
    torch.stack(losses).mean().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    return {
        "loss": [loss.detach().cpu() for loss in losses],
        "y": [y.detach().cpu() for y in ys],
        # each rank's own loss, not the mean, gave the dx of expert_parallel
        "dx": [x.grad.cpu() * case.world_size for x in xs],
        "grads": {n: p.grad.cpu() for n, p in layer.named_parameters()},
        "weights": {n: p.detach().cpu() for n, p in layer.named_parameters()},
    }


def compare(case: Case, ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """What `expert_parallel` gave on each rank against `one_process`."""
    if case.config.loss_reduction == "sum":  # ranks are added, not averaged
        expected = expected | {
            "grads": {
                n: g * case.world_size if n.startswith("experts.") else g
                for n, g in expected["grads"].items()
            },
            "weights": {},
        }
    for rank, got in enumerate(ranks):
        for name in ("loss", "y", "dx"):
            if name == "loss" and case.dtype == torch.bfloat16:
                continue  # a sum of both signs, in which the rounding of y's elements shows
            where = f"{name} of rank {rank}"
            tolerance = TOLERANCE[case.dtype]  # the loss is fp32 whatever the layer's dtype
            assert_close(got[name], expected[name][rank], name=where, tolerance=tolerance)
        for kind in ("grads", "weights"):
            for name, value in expected[kind].items():
                if name.startswith("experts."):
                    each = len(value) // case.world_size
                    value = value[rank * each : (rank + 1) * each]
                assert_close(got[kind][name], value, name=f"{kind} of {name}, rank {rank}")


def note_moves(transport: Transport, events: list[tuple[int, str]]) -> None:
    """Each move as the number of its part and a word."""
    plans = []

    def note(name, word):
        move = getattr(transport, name)

        def noted(*args, **kwargs):
            if name != "dispatch":
                if args[0] in plans:  # else the end of a dispatch
                    events.append((plans.index(args[0]), word))
                return move(*args, **kwargs)
            events.append((len(plans), word))
            sent = move(*args, **kwargs)
            plans.append(sent.plan)
            return sent

        setattr(transport, name, noted)

    note("dispatch", "out")
    note("replay", "out again")
    note("combine", "back")
    note("combine_gates", "gates back")
