"""A kernel launched bound, for GPUs that are not here: prints how often it was compiled for each
launch. `python -m tests.kernels.bound_once TARGET CASE`."""

import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
import triton

from ep_moe.kernels.grouped_wgrad import grouped_wgrad
from ep_moe.kernels.launch import bound
from ep_moe.kernels.symm_back import combine
from ep_moe.kernels.window import Link, Order
from tests.kernels import compile_all, touch_all
from tests.kernels.stand_in import StandIn
from tests.kernels.test_launch import _scaled, copied, scaled


def on_nvidia(driver: StandIn) -> list[int]:
    compiled, x = [], torch.zeros(65)

    def launch(*args: object, **how: object) -> None:
        scaled(*args, **how)
        compiled.append(len(driver.take()))

    launch(x[:64], None)
    launch(x[:64].clone(), None)  # the same again
    launch(x[:32], None)  # another integer
    launch(x[1:], None)  # not at 16 bytes
    launch(x[1:], None)
    launch(x[:64].double(), None)
    launch(x[:64], x[:64])
    launch(x[:64], None, scale=3)
    launch(x[:64], None, warps=2)
    launch(x[:64], None)
    at, more, *numbers = (driver.launched[i] for i in (-7, -6, -4, -3, -2, -1))
    assert [at, more, *numbers] == [x.data_ptr(), 0, 64, 3 << 40, 2, 64]
    constants = {"SCALE": 5, "BLOCK": 64, "num_warps": 4}
    _scaled.prepare((x.dtype, None, x.dtype), (0, 0), constants)
    compiled.append(len(driver.take()))
    launch(x[:64], None, scale=5)
    return compiled


def on_amd(driver: StandIn) -> list[int]:
    """Its addresses in a tensor may have 32 bits."""
    compiled = []
    for size in (2**20, 2**30, 2**20, 2**30):
        scaled(torch.empty(size, device="meta"), None)
        compiled.append(len(driver.take()))
    return compiled


def of_numbers(driver: StandIn) -> list[int]:
    """One that Triton would look at is refused: the next launch would have the first one's."""
    x, function = torch.zeros(64), _scaled.kernel.fn
    arguments = (x, None, x), (64, 1), {"SCALE": 2, "BLOCK": 64, "num_warps": 4}
    for alone, named in ([], "n"), (["n"], "far"), (["far"], "n"):
        kernel = bound(triton.jit(function, do_not_specialize=alone))
        with pytest.raises(AssertionError, match=f"^{named} is no part"):
            kernel((1, 1, 1), *arguments)
    bound(triton.jit(function, do_not_specialize=["n", "far"]))((1, 1, 1), *arguments)
    return [len(driver.take())]


def of_few_tokens(driver: StandIn) -> list[int]:
    """What a graph will launch is there after the first call, and it is what many tokens take."""
    compiled = []
    ints = partial(torch.empty, dtype=torch.int32, device="meta")
    peers = torch.empty(3, dtype=torch.int64, device="meta")
    link = Link(peers, ints(128), ints(4), rank=0, most=2048, programs=16, timeout_ns=10**12)
    rows = torch.empty(4096, 256, dtype=torch.bfloat16, device="meta")
    for tokens in (128, 128, 129, 2048):
        combine(rows, Order(ints(4 * (1 + tokens)), tokens), link)
        compiled.append(len(driver.take()))
    return compiled


def of_descriptors(driver: StandIn) -> list[int]:
    compiled, x = [], torch.zeros(64)

    def launch(*args: object, **how: object) -> None:
        copied(*args, **how)
        compiled.append(len(driver.take()))

    launch(x)
    launch(x.clone(), scale=0.25)  # the same again
    from_, _, scale, _ = driver.launched[-4:]
    assert (from_.base.shape, scale) == ((64,), 0.25)
    launch(x.half())
    launch(x, block=32)
    launch(x, described="out")
    launch(x, described="x")
    launch(x, described="")
    launch(torch.zeros(65)[1:], described="out")  # not at 16 bytes
    launch(x)
    return compiled


def of_products(driver: StandIn) -> list[int]:
    """Each twice: by pointers, by descriptors, and by warps of their own."""
    compiled = []
    for arch in ("sm_80", "sm_90"):  # whose tiles they are
        for _, launch in compile_all.products(arch, torch.bfloat16, compile_all.T):
            compiled.append(built_by(launch, driver))
    for _, launch in compile_all.specialized():
        compiled.append(built_by(launch, driver))
    d_y, x = (torch.zeros(9, width, dtype=torch.bfloat16) for width in (64, 128))
    offsets, index = (torch.zeros(n, dtype=torch.int32) for n in (3, 9))
    form = {"arrived_of_packed": index, "gathered": "x", "scale": 3}
    for tile in touch_all.SPECIALIZED.values():
        d_weight = grouped_wgrad(d_y, x, offsets, **form, tile=tile)
        *operands, starts, rows, scale, tiles = driver.launched[9:16]
        assert [operands[0].base.data_ptr(), operands[1]] == [d_y.data_ptr(), x.data_ptr()]
        assert operands[2].base.data_ptr() == d_weight.data_ptr()
        assert [starts, rows] == [offsets.data_ptr(), index.data_ptr()]
        assert [scale, type(scale), tiles] == [3.0, float, 2]
    return [number for pair in compiled for number in pair]


def built_by(launch: Callable[[], object], driver: StandIn) -> tuple[int, int]:
    """How much the first time, and the second."""
    launch()
    first = len(driver.take())
    launch()
    return first, len(driver.take())


if __name__ == "__main__":
    target, case = sys.argv[1:]
    cases = {"scaled": on_nvidia, "large": on_amd, "few": of_few_tokens}
    cases |= {"numbers": of_numbers, "descriptors": of_descriptors, "products": of_products}
    print(*cases[case](StandIn(target)))
