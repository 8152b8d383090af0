"""What has to happen to the balance once per optimizer step."""

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ep_moe.routing import Router, updated_bias


class BalanceHook:
    """What `balance_hook` returns."""

    def __init__(self, step_hook: RemovableHandle, routers: list[Router]) -> None:
        self.step_hook, self.routers = step_hook, routers

    def remove(self) -> None:
        """No more updates and no more counts, which nobody would clear."""
        self.step_hook.remove()
        for router in self.routers:
            router.counting, router.tokens_since_step = False, None


def balance_hook(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, bias_rate: float = 1e-3
) -> BalanceHook:
    """From now on routers count their tokens, and after each `optimizer.step()` the selection
    biases move towards balance (config.expert_bias) and the counts start again.

    Counts are summed over micro-batches and over the ranks of `balance_over`, so that every rank
    applies the same update. Evaluation and recomputation do not count. With aux_loss_scope global
    the loss then uses the counts of the accumulation steps so far. All ranks must step together.
    `remove()` of what this returns ends it.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router in routers:
        router.counting = True

    def after_step(*_: object) -> None:
        for router in routers:
            if router.expert_bias is not None:
                counts = router.tokens_since_step
                if counts is None:  # no forward pass since the last step on this rank
                    counts = torch.zeros_like(router.expert_bias, dtype=torch.int64)
                n = router.reduce(counts)
                router.expert_bias.copy_(updated_bias(router.expert_bias, n, bias_rate))
            router.tokens_since_step = None

    return BalanceHook(optimizer.register_step_post_hook(after_step), routers)
