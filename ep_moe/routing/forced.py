"""Routings that ignore the logits' order, for benchmarks: evenly spread, or skewed by a given
factor.

Which experts a token meets is pseudo-random in both, so that a token touches as many ranks as it
would by chance.
"""

import torch
from torch import Tensor

from ep_moe.config import MoEConfig

_SEED = 0


class ForcedRouting:
    """The experts of T tokens by `config.forced_routing`, the same for the same T. The last draw is
    kept: a benchmark would time the drawing."""

    def __init__(self, config: MoEConfig) -> None:
        self.config = config
        self._drawn: tuple[int, torch.device, Tensor] | None = None

    def ids(self, num_tokens: int, device: torch.device) -> Tensor:
        """(T,K) int64, K distinct experts a token. Not to be changed in place."""
        if self._drawn is None or self._drawn[:2] != (num_tokens, device):
            table = {"balanced": _balanced, "skewed": _skewed}
            generator = torch.Generator().manual_seed(_SEED)
            draw = table[self.config.forced_routing]
            ids = draw(num_tokens, self.config, generator).to(device)
            self._drawn = (num_tokens, device, ids)
        return self._drawn[2]


def _balanced(num_tokens: int, config: MoEConfig, generator: torch.Generator) -> Tensor:
    """Blocks of E tokens in which every choice k meets every expert once: exactly even when T is a
    multiple of E.

    id(t,k) = shuffle_of_block[(t + k) mod E]
    """
    experts = config.num_experts
    blocks = -(-num_tokens // experts)
    shuffles = torch.rand(max(blocks, 1), experts, generator=generator).argsort(dim=1)
    t = torch.arange(num_tokens)[:, None]
    return shuffles[t // experts, (t + torch.arange(config.top_k)) % experts]


def _skewed(num_tokens: int, config: MoEConfig, generator: torch.Generator) -> Tensor:
    """Loads falling as a power of the expert's number, the busiest `forced_skew` times the mean.

    Systematic sampling: lay the experts, in a random order per token, end to end with their
    inclusion probabilities (they sum to K, none above 1) as lengths, and take the K that the
    points u, u+1, ... fall on: distinct, and each expert with exactly its probability.
    """
    length = _power_loads(config)  # (E,)
    order = torch.rand(num_tokens, config.num_experts, generator=generator).argsort(dim=1)
    ends = length[order].cumsum(dim=1)
    points = torch.rand(num_tokens, 1, generator=generator, dtype=torch.float64) + torch.arange(
        config.top_k
    )
    position = torch.searchsorted(ends, points, right=True).clamp_max(config.num_experts - 1)
    return order.gather(1, position)


def _power_loads(config: MoEConfig) -> Tensor:
    """Inclusion probabilities K * (i+1)^-a / sum, with a found by bisection so that the largest is
    skew * K / E."""
    rank = torch.arange(1, config.num_experts + 1, dtype=torch.float64)
    low, high = 0.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2
        share = rank**-middle / (rank**-middle).sum()
        if share[0] * config.num_experts < config.forced_skew:
            low = middle
        else:
            high = middle
    share = rank**-low / (rank**-low).sum()
    return config.top_k * share
