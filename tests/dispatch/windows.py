"""Windows without GPUs: files that every rank maps, in the place of memory that GPUs share. The
kernels then run in Triton's interpreter."""

from pathlib import Path

import pytest
import torch
import triton.language as tl

from ep_moe.dispatch import symm
from ep_moe.kernels import symm_back, window

# How ranks are run with tensors on GPUs, which they share where there are fewer of them.
ON_GPUS = {
    "collective": {"backend": "nccl", "timeout": 240.0},
    "symm": {
        "timeout": 240.0,
        "environ": {
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        },
    },
}

needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU kernels are compiled, and files are not for those"
)


def share_files(folder, *, programs=2):
    """In each rank: `symm` maps files of this folder. Few programs, for the interpreter is slow;
    few rows at a time, so that the few rows of a test take all steps."""
    views = []  # they stay mapped

    def allocate(size, ep, device):
        number = len(views)
        mine = Path(folder, f"window.{number}.{ep.rank}")
        mine.write_bytes(b"\x7f" * size)  # nothing may count on zeros
        ep.peers.gather(number, "the files")
        views.append(
            [
                torch.from_file(
                    str(Path(folder, f"window.{number}.{rank}")),
                    shared=True,
                    size=size,
                    dtype=torch.uint8,
                )
                for rank in range(ep.size)
            ]
        )
        return views[-1][ep.rank], [view.data_ptr() for view in views[-1]]

    symm.allocate, symm.SMS = allocate, programs
    window.BYTES, symm_back.FEW, symm_back.LATE = 512, 4, 2
    symm_back.AT_LEAST = tl.constexpr(2)
