"""Grouped top-k by other means: logits (T,E) to gate weights and ids.

As plain torch writes it, with its gradient, and by the kernels of inference engines, which only
select. An engine has two: one takes sigmoid scores with a bias and adds up the best two of a group,
the other takes the softmax of all experts. Both give the choices in our order, the best first.
"""

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from benchmarks.peers import Unavailable
from benchmarks.peers.peer import missing
from ep_moe import SelectionConfig
from ep_moe.ops import SCORING, dense_probabilities

Select = Callable[[Tensor], tuple[Tensor, Tensor]]
Make = Callable[[SelectionConfig, Tensor | None], Select]


def eager(config: SelectionConfig, expert_bias: Tensor | None) -> Select:
    """The reference that inference engines share, with `torch.topk` and a mask of scores."""
    groups, score = config.num_expert_group, SCORING[config.scoring_func].score

    def run(logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = score(logits.float())
        biased = scores if expert_bias is None else scores + expert_bias
        if groups > 1:
            in_groups = biased.view(len(logits), groups, -1)
            if config.group_score == "max":
                group_scores = in_groups.amax(dim=-1)
            else:
                group_scores = in_groups.topk(2, dim=-1).values.sum(dim=-1)
            kept = group_scores.topk(config.topk_group, dim=-1, sorted=False).indices
            mask = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, kept, True)
            biased = in_groups.masked_fill(~mask[..., None], -torch.inf).flatten(1)
        ids = biased.topk(config.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if config.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * config.routed_scaling_factor, ids.int()

    return run


def compiled(config: SelectionConfig, expert_bias: Tensor | None) -> Select:
    """The same through `torch.compile`."""
    return torch.compile(eager(config, expert_bias), dynamic=False)


def vllm(config: SelectionConfig, expert_bias: Tensor | None) -> Select:
    """vLLM's CUDA kernels."""
    _require(config, expert_bias)
    try:
        from vllm._custom_ops import (  # pyright: ignore[reportMissingImports]
            grouped_topk,
            topk_softmax,
        )
    except ImportError as error:
        raise missing("`pip install vllm==0.23.0`", error) from error
    return _like_vllm(config, expert_bias, grouped_topk, topk_softmax)


def flag_gems(config: SelectionConfig, expert_bias: Tensor | None) -> Select:
    """FlagGems' Triton kernels, two launches for groups: the version that it keeps for Hopper and
    runs anywhere; the one it exports takes the sigmoid in several more."""
    _require(config, expert_bias)
    try:
        hopper = import_module("flag_gems.runtime.backend._nvidia.hopper.grouped_topk")
        from flag_gems.fused import topk_softmax  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise missing("`pip install flag-gems==5.0.2`", error) from error
    return _like_vllm(config, expert_bias, hopper.grouped_topk, topk_softmax)


def sglang(config: SelectionConfig, expert_bias: Tensor | None) -> Select:
    """SGLang's CUDA kernels."""
    _require(config, expert_bias)
    if expert_bias is not None:
        experts, groups = len(expert_bias), config.num_expert_group
        if experts & (experts - 1) or experts > 32 * groups or not config.renormalize:
            raise Unavailable("it takes 2^n experts, up to 32 in a group, and renormalises")
    try:
        from sgl_kernel import (  # pyright: ignore[reportMissingImports]
            moe_fused_gate,
            topk_softmax,
        )
    except ImportError as error:
        raise missing("`pip install sglang-kernel==0.4.4` (for torch 2.11)", error) from error

    def grouped(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        groups, scale = (config.num_expert_group, config.topk_group), config.routed_scaling_factor
        weights, ids = moe_fused_gate(logits, bias, *groups, config.top_k, 0, scale, True)
        return weights, ids

    def softmax(weights: Tensor, ids: Tensor, logits: Tensor) -> None:
        topk_softmax(weights, ids, logits, config.renormalize)

    return _by_kernel(config, expert_bias, grouped, softmax)


# To add a peer: a function above and its line here.
FORWARD_ONLY: dict[str, Make] = {"vllm": vllm, "flag_gems": flag_gems, "sglang": sglang}
PEERS: dict[str, Make] = {"eager": eager, "torch.compile": compiled, **FORWARD_ONLY}

# Distributions whose versions are part of a measurement.
PACKAGES = ("vllm", "flag-gems", "sglang-kernel")


def loss_sums(logits: Tensor, config: SelectionConfig) -> tuple[Tensor, Tensor]:
    """Sums of probabilities and of squared log-sum-exps over the tokens."""
    logits = logits.float()
    return dense_probabilities(logits, config).sum(0), logits.logsumexp(dim=1).square().sum()


def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order of slots, place of each slot, offsets) by a stable sort."""
    by_expert, order = ids.flatten().sort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=ids.device)
    edges = torch.arange(num_experts + 1, device=ids.device, dtype=ids.dtype)
    return order, place, torch.searchsorted(by_expert, edges)


def _require(config: SelectionConfig, expert_bias: Tensor | None) -> None:
    """What the kernels of all engines require."""
    if expert_bias is not None:
        computed = (config.scoring_func, config.group_score) == ("sigmoid", "top2_sum")
    else:
        plain = config.num_expert_group == 1 and config.routed_scaling_factor == 1
        computed = plain and config.scoring_func == "softmax"
    if not computed:
        raise Unavailable(
            "its kernels take sigmoid scores with a bias and groups by the sum of their best two, "
            "or the softmax of all experts without groups, bias and scaling"
        )
    if not torch.cuda.is_available():
        raise Unavailable("it runs on a GPU")


def _like_vllm(
    config: SelectionConfig,
    expert_bias: Tensor | None,
    grouped_topk: Callable[..., tuple[Tensor, Tensor]],
    topk_softmax: Callable[..., None],
) -> Select:
    """By kernels that are called as vLLM's are."""

    def grouped(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        groups = (config.num_expert_group, config.topk_group)
        weighing = (config.renormalize, config.routed_scaling_factor)
        return grouped_topk(logits, *groups, config.top_k, *weighing, bias, 1)  # 1 = sigmoid

    def softmax(weights: Tensor, ids: Tensor, logits: Tensor) -> None:
        topk_softmax(weights, ids, torch.empty_like(ids), logits, config.renormalize)

    return _by_kernel(config, expert_bias, grouped, softmax)


def _by_kernel(
    config: SelectionConfig,
    expert_bias: Tensor | None,
    grouped: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    softmax: Callable[[Tensor, Tensor, Tensor], None],
) -> Select:
    """The kernel of the two that this selection is for.

    grouped(logits, bias) -> (gate weights, ids); softmax(gate weights, ids, logits) fills them.
    """

    def run(logits: Tensor) -> tuple[Tensor, Tensor]:
        weights = logits.new_empty(len(logits), config.top_k)
        ids = torch.empty_like(weights, dtype=torch.int32)
        softmax(weights, ids, logits)
        return weights, ids

    return run if expert_bias is None else lambda logits: grouped(logits, expert_bias)
