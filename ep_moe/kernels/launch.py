"""Launches that cost the host little: a move between ranks takes 20 µs of the device, and Triton's
own launch 30 to 45 of the host, most of it to look again at each argument, option and global that
the kernel reads. What was compiled for equal arguments is launched as it is, in half of that."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

Grid = tuple[int, int, int]
Argument = Any  # a tensor, a descriptor of one, of Triton or Gluon, or None


class bound:  # a decorator, above @triton.jit
    """Of a kernel whose tensors come first, then its numbers, which are not specialised (those of
    64 bits are annotated, a float is always given as one), then its constants.

    A tensor may be a descriptor of one. Its block and layout must follow from the constants.

    Compiled anew for another device, dtype, constant or option, where others are descriptors, where
    other tensors begin at 16 bytes, and on AMD where others are so large that 32 bits do not
    address them. What changes in Triton's own settings after that, or in a global that the kernel
    reads, it does not see. Nor does it see a tensor of the CPU: who calls it has to.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.compiled = kernel, dict[tuple, Any]()
        constants = [p.name for p in getattr(kernel, "params", ()) if p.is_constexpr]
        self.constants = tuple(constants)
        self.__doc__ = kernel.__doc__

    def __call__(
        self,
        grid: Grid,
        tensors: tuple[Argument, ...],
        numbers: tuple[int | float, ...],
        constants: Mapping[str, Any],
    ) -> None:
        """constants: and options, always in the same order."""
        if not isinstance(self.kernel, triton.runtime.JITFunction):  # interpreted
            self.kernel[grid](*tensors, *numbers, **constants)
            return
        arguments: list[Any] = []
        kinds: list[object] = []
        bits = 0
        for tensor in tensors:
            if tensor is None:
                arguments.append(0)
                kinds.append(None)
            elif isinstance(tensor, Tensor):
                pointer = tensor.data_ptr()  # of a tensor the launch would ask the driver
                bits |= pointer
                arguments.append(pointer)
                kinds.append(tensor.dtype)
            else:
                arguments.append(tensor)
                kinds.append((tensor.base.dtype,))
        form: object = not bits % 16 or tuple(_aligned(tensor) for tensor in tensors)
        if torch.version.hip:
            form = form, tuple(_near(tensor) for tensor in tensors)
        compiled, last = self._compiled(form, kinds, tensors, numbers, constants)
        compiled[grid](*arguments, *numbers, *last)

    def prepare(
        self,
        dtypes: Sequence[torch.dtype | None],
        numbers: tuple[int | float, ...],
        constants: Mapping[str, Any],
    ) -> None:
        """Compile and load, on NVIDIA, what a launch with such tensors will need: the capture of a
        CUDA graph should hold neither."""
        if isinstance(self.kernel, triton.runtime.JITFunction) and not torch.version.hip:
            compiled, _ = self._compiled(True, dtypes, dtypes, numbers, constants)
            _ = compiled[1, 1, 1]  # loads it

    def _compiled(
        self,
        form: object,
        kinds: Sequence[object],
        tensors: Sequence[Argument | torch.dtype],
        numbers: tuple[int | float, ...],
        constants: Mapping[str, Any],
    ) -> tuple[Any, tuple]:
        """-> the kernel for such arguments, and the constants in its order"""
        device = triton.runtime.driver.active.get_current_device()
        key = (device, form, *kinds, *constants.values())
        found = self.compiled.get(key)
        if found is None:
            for p in self.kernel.params[len(tensors) :]:
                assert p.is_constexpr or p.do_not_specialize, f"{p.name} is no part of the key"
            compiled = self.kernel.warmup(*tensors, *numbers, grid=(1, 1, 1), **constants)
            found = compiled, tuple(constants[name] for name in self.constants)
            self.compiled[key] = found
        return found


def cdiv(number: int, size: int) -> int:
    """How many blocks of a size hold so many, as Triton's, which a kernel may call too and which
    takes 2 µs to find out who does; a training step asks 35 times."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    """The least that is not smaller than a number of 1 or more, as Triton's."""
    return 1 << (number - 1).bit_length()


def _aligned(tensor: Argument) -> bool:
    return not isinstance(tensor, Tensor) or tensor.data_ptr() % 16 == 0


def _near(tensor: Argument) -> bool:
    return not isinstance(tensor, Tensor) or tensor.untyped_storage().nbytes() < 2**31
