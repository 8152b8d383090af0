"""Other people's expert layers on our weights: from x, ids and gate weights to y, on one device.

A peer gets what its own router would give it (dtypes included), prepared outside the timed call,
and is checked against ours before it is timed. Where one cannot run, `Unavailable` says why.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ep_moe import Experts, MoEConfig


class Unavailable(RuntimeError):
    """This peer cannot run here; the message is the reason to print."""


@dataclass(frozen=True)
class Peer:
    """run(x (T,H), ids (T,K), gate_weights (T,K)) -> y (T,H), differentiable in x, the gate weights
    and the experts' weights.

    graphable: it never waits for the device.
    """

    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    ids_dtype: torch.dtype
    gate_dtype: torch.dtype
    graphable: bool


def torch_loop(config: MoEConfig, experts: Experts) -> Peer:
    """What plain torch does well: one sort, one host sync, two products per expert, and a weighted
    sum without atomics."""
    _require_plain_swiglu(config)
    weights = (experts.w_gate_up, experts.w_down)

    def run(x: Tensor, ids: Tensor, gate_weights: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        rows_of_expert = ids.flatten().bincount(minlength=config.num_experts).tolist()
        chunks = x[order // config.top_k].split(rows_of_expert)
        # unbind and not w[e], whose backward would fill a gradient of all experts for each of them
        experts_of_chunk = zip(chunks, *(w.unbind() for w in weights), strict=True)
        outputs = [
            _swiglu(rows @ gate_up.t()) @ down.t() for rows, gate_up, down in experts_of_chunk
        ]
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order), device=x.device)
        y_TKH = torch.cat(outputs)[position].view(*ids.shape, -1)
        return torch.bmm(gate_weights[:, None], y_TKH).squeeze(1)

    return Peer(run, torch.int64, weights[0].dtype, graphable=False)


def transformers_grouped_mm(config: MoEConfig, experts: Experts) -> Peer:
    """Hugging Face's experts of Qwen3-MoE, `grouped_mm` implementation, holding the same
    parameters."""
    _require_plain_swiglu(config)
    try:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
    except ImportError as error:
        raise Unavailable(
            f"transformers with Qwen3MoeExperts is not importable: {error}"
        ) from error
    choices = {
        "hidden_size": config.hidden_size,
        "moe_intermediate_size": config.intermediate_size,
        "num_experts": config.num_experts,
        "experts_implementation": "grouped_mm",
    }
    with torch.device("meta"):
        module = Qwen3MoeExperts(Qwen3MoeConfig(**choices))
    module.gate_up_proj, module.down_proj = experts.w_gate_up, experts.w_down
    return Peer(module, torch.int64, experts.w_down.dtype, graphable=True)


# To add a peer: a function above and its line here.
PEERS: dict[str, Callable[[MoEConfig, Experts], Peer]] = {
    "torch_loop": torch_loop,
    "transformers_grouped_mm": transformers_grouped_mm,
}


def dense_products(
    rows: Tensor, hidden: Tensor, w_gate_up: Tensor, w_down: Tensor
) -> tuple[Tensor, Tensor]:
    """Not a peer but a ceiling: the experts' multiplications as two dense products with the weights
    of one expert, and nothing else.

    rows (N,H), hidden (N,I), N = T*K. The backward from both outputs is four more such products.
    """
    return F.linear(rows, w_gate_up), F.linear(hidden, w_down)


@torch.no_grad()
def largest_error(
    outputs: Tensor | tuple[Tensor, ...], expected: Tensor | tuple[Tensor, ...]
) -> float:
    """||out - expected|| / ||expected|| in float64, the largest of the pairs; NaN if one holds a
    NaN."""
    pairs = zip(_as_tuple(outputs), _as_tuple(expected), strict=True)
    errors = [
        torch.linalg.vector_norm(out.double() - want.double())
        / torch.linalg.vector_norm(want.double())
        for out, want in pairs
    ]
    return float(torch.stack(errors).max())


def error_limit(dtype: torch.dtype) -> float:
    """More than two right implementations differ by: each rounds to `dtype` a few times."""
    return 1e-3 if dtype == torch.float32 else 2e-2


def _as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _require_plain_swiglu(config: MoEConfig) -> None:
    if config.activation != "swiglu" or config.mlp_bias:
        raise Unavailable("it computes SwiGLU experts without biases only")
