"""Launches that cost the host little: a move between ranks takes 20 µs of the device, and Triton's
own launch 30 to 45 of the host, most of it to look again at each argument, option and global that
the kernel reads. What was compiled for equal arguments is launched as it is, in half of that."""

from collections.abc import Mapping
from typing import Any

import triton
from torch import Tensor

Grid = tuple[int, int, int]


class bound:  # a decorator, above @triton.jit
    """Of a kernel whose tensors come first, then its integers, which are not specialised (those of
    64 bits are annotated), then its constants.

    Compiled anew for another device, dtype, constant or option, and where other tensors begin at 16
    bytes.
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
        aligned = not bits % 16 or tuple(pointer % 16 for pointer in pointers)
        device = triton.runtime.driver.active.get_current_device()
        key = (device, aligned, *dtypes, *constants.values())
        found = self.compiled.get(key)
        if found is None:
            compiled = self.kernel.warmup(*tensors, *integers, grid=grid, **constants)
            found = compiled, tuple(constants[name] for name in self.constants)
            self.compiled[key] = found
        compiled, last = found
        compiled[grid](*pointers, *integers, *last)  # of each tensor it would ask the driver
