"""Launches that cost the host little: a move between ranks takes 20 µs of the device, and Triton's
own launch 30 to 45 of the host, most of it to look again at each argument, option and global that
the kernel reads. What was compiled for equal arguments is launched as it is, in half of that."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

Grid = tuple[int, int, int]


class bound:  # a decorator, above @triton.jit
    """Of a kernel whose tensors come first, then its integers, which are not specialised (those of
    64 bits are annotated), then its constants.

    Compiled anew for another device, dtype, constant or option, where other tensors begin at 16
    bytes, and on AMD where others are so large that 32 bits do not address them. What changes in
    Triton's own settings after that, or in a global that the kernel reads, it does not see. Nor
    does it see a tensor of the CPU: who calls it has to.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.compiled = kernel, dict[tuple, Any]()
        constants = [p.name for p in getattr(kernel, "params", ()) if p.is_constexpr]
        self.constants = tuple(constants)
        self.__doc__ = kernel.__doc__

    def __call__(
        self,
        grid: Grid,
        tensors: tuple[Tensor | None, ...],
        integers: tuple[int, ...],
        constants: Mapping[str, Any],
    ) -> None:
        """constants: and options, always in the same order."""
        if not isinstance(self.kernel, triton.runtime.JITFunction):  # interpreted
            self.kernel[grid](*tensors, *integers, **constants)
            return
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        form: object = not bits % 16 or tuple(pointer % 16 == 0 for pointer in pointers)
        if torch.version.hip:
            form = form, tuple(tensor is None or _near(tensor) for tensor in tensors)
        compiled, last = self._compiled(form, dtypes, tensors, integers, constants)
        compiled[grid](*pointers, *integers, *last)  # of each tensor it would ask the driver

    def prepare(
        self,
        dtypes: Sequence[torch.dtype | None],
        integers: tuple[int, ...],
        constants: Mapping[str, Any],
    ) -> None:
        """Compile and load, on NVIDIA, what a launch with such tensors will need: the capture of a
        CUDA graph should hold neither."""
        if isinstance(self.kernel, triton.runtime.JITFunction) and not torch.version.hip:
            compiled, _ = self._compiled(True, dtypes, dtypes, integers, constants)
            _ = compiled[1, 1, 1]  # loads it

    def _compiled(
        self,
        form: object,
        dtypes: Sequence[torch.dtype | None],
        tensors: Sequence[Tensor | torch.dtype | None],
        integers: tuple[int, ...],
        constants: Mapping[str, Any],
    ) -> tuple[Any, tuple]:
        """-> the kernel for such arguments, and the constants in its order"""
        device = triton.runtime.driver.active.get_current_device()
        key = (device, form, *dtypes, *constants.values())
        found = self.compiled.get(key)
        if found is None:
            compiled = self.kernel.warmup(*tensors, *integers, grid=(1, 1, 1), **constants)
            found = compiled, tuple(constants[name] for name in self.constants)
            self.compiled[key] = found
        return found


def _near(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() < 2**31
