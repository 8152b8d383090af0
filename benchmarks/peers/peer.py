"""What a peer is, what it may require, and when its result is right."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ep_moe import Experts, MoEConfig

Weights = tuple[Tensor, Tensor]
_PART = 2**25  # numbers that are compared at a time


class Unavailable(RuntimeError):
    """This peer cannot run here; the message is the reason to print."""


def as_ours(w_gate_up: Tensor, w_down: Tensor) -> Weights:
    """The layout of a peer that computes with our weights themselves."""
    return w_gate_up, w_down


@dataclass(frozen=True)
class Peer:
    """run(x (T,H), ids (T,K), gate_weights (T,K)) -> y (T,H), differentiable in x, the gate weights
    and the experts' weights.

    graphable  it never waits for the device
    trains     without it there is no backward: only the forward is compared
    weights    what it differentiates by where it holds a copy of another layout; None: by the
               experts' own
    ours       brings the gradients of `weights` into our layout, to be checked (never timed)
    """

    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    ids_dtype: torch.dtype
    gate_dtype: torch.dtype
    graphable: bool
    trains: bool = True
    weights: Weights | None = None
    ours: Callable[[Tensor, Tensor], Weights] = as_ours


def require_plain_swiglu(config: MoEConfig) -> None:
    if config.activation != "swiglu" or config.mlp_bias:
        raise Unavailable("it computes SwiGLU experts without biases only")


def require_gpu(experts: Experts) -> None:
    """For kernels whose tiles are chosen for numbers of two bytes."""
    if not experts.w_down.is_cuda or experts.w_down.itemsize != 2:
        raise Unavailable("it runs on a GPU, in bfloat16 or float16")


def missing(what: str, error: ImportError) -> Unavailable:
    """what: the install that would help, with the version these calls are written for."""
    return Unavailable(f"it needs {what} ({error})")


def interleaved(w_gate_up: Tensor) -> Tensor:
    """A copy with rows g0 u0 g1 u1 ... of the rows g0 g1 ... u0 u1 ...  (E,2I,H) -> (E,2I,H)"""
    return w_gate_up.detach().unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()


def halves(interleaved: Tensor) -> Tensor:
    """The other way: a copy with the gate half first.  (E,2I,H) -> (E,2I,H)"""
    return interleaved.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


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
    """||out - expected|| / ||expected|| in float64, the largest of the pairs; 0 where both are 0,
    NaN if one holds a NaN."""
    pairs = zip(_as_tuple(outputs), _as_tuple(expected), strict=True)
    return float(torch.stack([_error(out, want) for out, want in pairs]).max())


def _error(out: Tensor, want: Tensor) -> Tensor:
    """By parts: gradients of experts are gigabytes, and four times that in float64."""
    if out.shape != want.shape:
        raise ValueError(f"an output of shape {tuple(out.shape)} beside {tuple(want.shape)}")
    squares = torch.zeros(2, dtype=torch.float64, device=want.device)
    for part, wanted in zip(*(v.flatten().split(_PART) for v in (out, want)), strict=True):
        wanted = wanted.double()
        squares += torch.stack([(part.double() - wanted).square().sum(), wanted.square().sum()])
    off, size = squares.sqrt()
    return off / size.clamp_min(torch.finfo(torch.float64).tiny)


def error_limit(dtype: torch.dtype) -> float:
    """More than two right implementations differ by: each rounds to `dtype` a few times."""
    return 1e-3 if dtype == torch.float32 else 2e-2


def _as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs
