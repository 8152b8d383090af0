"""What the three fakes share: refusals, events that hold results back, and one exchange.

Tensors are pickled and gathered by everybody: slow, simple, and checked. What would deadlock or
corrupt memory on GPUs (ranks that differ in the call or in its sizes) raises on every rank here.
"""

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

topk_idx_t = torch.int64
NUM_DEVICE_SMS = 132  # of an H100 or H200
_SCALAR_TYPES = {
    torch.float32: "Float", torch.float64: "Double", torch.int32: "Int", torch.int64: "Long",
    torch.bfloat16: "BFloat16",
}  # fmt: skip
_calls = itertools.count()


def host_assert(condition: object, text: str) -> None:
    """The checks of the C++ side arrive in Python as RuntimeError with the condition's text."""
    if not condition:
        raise RuntimeError(f"Assertion exception: {text}")


def compiled_for(condition: object, text: str) -> None:
    """Static assertions of kernels that are compiled at the first call with a shape."""
    if not condition:
        raise RuntimeError(f"Compilation of the kernel failed: static assertion: {text}")


def data_ptr(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """`tensor.data_ptr<T>()` of C++: the dtype is never converted."""
    if tensor.dtype != dtype:
        wanted, found = (_SCALAR_TYPES.get(d, str(d)) for d in (dtype, tensor.dtype))
        raise RuntimeError(f"expected scalar type {wanted} but found {found} ({name})")
    return tensor


def argument(value: object, kind: type | tuple[type, ...], name: str) -> None:
    """Arguments that the bindings cannot convert: None where a number is needed, for example."""
    if not isinstance(value, kind):
        raise TypeError(f"incompatible function arguments: {name} = {value!r}")


def shape_of(tensor: Tensor, dims: int, name: str) -> tuple[int, ...]:
    argument(tensor, Tensor, name)
    host_assert(tensor.dim() == dims, f"{name}.dim() == {dims}")
    return tuple(tensor.shape)


def align(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def env_int(name: str, default: int = 0) -> int:
    return int(os.environ.get(name, default))


def check_torch_deterministic() -> None:
    filled = torch.utils.deterministic.fill_uninitialized_memory
    assert not (torch.are_deterministic_algorithms_enabled() and filled)


def poison_(tensor: Tensor) -> Tensor:
    """What memory may hold before anything was written."""
    if tensor.dtype.is_floating_point and tensor.element_size() > 1:
        return tensor.fill_(float("nan"))
    if tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(0x7F)  # NaN of e4m3
        return tensor
    return tensor.fill_(torch.iinfo(tensor.dtype).max // 3)


def unwritten(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return poison_(torch.empty(shape, dtype=dtype))


class EventHandle:
    """An event whose results exist only once it was waited for."""

    def __init__(self) -> None:
        self._writes: list[Callable[[], object]] = []

    def current_stream_wait(self) -> None:
        writes, self._writes = self._writes, []
        for write in writes:
            write()


class EventOverlap:
    """V1's wrapper: nothing to wait for unless the call was asynchronous."""

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[Tensor] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        assert self.event is not None
        self.event.current_stream_wait()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if self.event is not None:
            self.event.current_stream_wait()


def hold_back(tensors: list[Tensor | None]) -> list[Callable[[], object]]:
    """Poisons the tensors; the writes returned bring their values."""
    writes: list[Callable[[], object]] = []
    for tensor in tensors:
        if tensor is not None:
            value = tensor.clone()
            poison_(tensor)
            writes.append(lambda tensor=tensor, value=value: tensor.copy_(value))
    return writes


def exchange(
    group: dist.ProcessGroup, agreed: dict[str, object], sent: list[Any], fault: str = ""
) -> list[Any]:
    """sent[r] goes to rank r; returns what every rank sent to this one.

    `agreed` must be equal on all ranks. A `fault` of one rank (a trap in its kernel) fails all of
    them, as peers would wait for ever.
    """
    everybody: list[Any] = [None] * group.size()
    dist.all_gather_object(everybody, (agreed, sent, fault), group)
    for rank, (_, _, wrong) in enumerate(everybody):
        if wrong:
            raise RuntimeError(f"CUDA error: unspecified launch failure (rank {rank}: {wrong})")
    for rank, (theirs, _, _) in enumerate(everybody):
        if theirs != everybody[0][0]:
            raise RuntimeError(
                f"timeout: rank {rank} called {theirs}, and rank 0 called {everybody[0][0]}"
            )
    return [theirs[group.rank()] for _, theirs, _ in everybody]


def reads_nowhere(topk_idx: Tensor, num_experts: int) -> str:
    """A fault, if an id names an expert that nobody has."""
    return "illegal memory access: expert id" if (topk_idx >= num_experts).any() else ""


def names_twice(topk_idx: Tensor) -> str:
    """A fault, if a row names one expert twice."""
    ordered = topk_idx.sort(1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    return "device assertion: a duplicate expert in a row" if twice.any() else ""


def shuffled(items: Tensor, rank: int) -> Tensor:
    """Another order in every call, and never the order given: slots are given out by atomics."""
    generator = torch.Generator().manual_seed(7919 * next(_calls) + rank)
    order = torch.randperm(len(items), generator=generator)
    if len(items) > 1 and torch.equal(order, torch.arange(len(items))):
        order = order.roll(1)
    return items[order]


def unpack_bias(bias: Any) -> tuple[Any, Any]:
    if isinstance(bias, Tensor):
        return bias, None
    if isinstance(bias, tuple):
        assert len(bias) == 2
        return bias
    return None, None


def check_bias(biases: tuple[Any, Any], x: Tensor, num_tokens: int) -> Tensor:
    """The sum that a reduction starts from, in fp32."""
    total = torch.zeros(num_tokens, x.shape[1])
    for bias in biases:
        if bias is not None:
            host_assert(bias.dim() == 2 and bias.is_contiguous(), "bias.is_contiguous()")
            host_assert(bias.dtype == x.dtype, "bias.scalar_type() == x.scalar_type()")
            host_assert(tuple(bias.shape) == (num_tokens, x.shape[1]), "bias.size(0) == num_tokens")
            total += bias.detach().float()
    return total
