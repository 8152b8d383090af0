"""Every kernel launched bound, for a GPU that is not here, each time with the kernel that Triton's
own launch would take: prints how many launches there were, and which kernels were in none. `python
-m tests.kernels.same_kernel TARGET`. Nothing is compiled."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
import triton

import ep_moe.kernels
from ep_moe.kernels.grouped_wgrad import grouped_wgrad
from ep_moe.kernels.launch import bound
from tests.kernels import compile_all, touch_all
from tests.kernels.cases import TILES
from tests.kernels.stand_in import StandIn
from tests.kernels.test_launch import copied, scaled


class Compiled:
    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: None


def compiled(self: Any, key: str, signature: object, device: int, *rest: object) -> Compiled:
    """In place of Triton's compiler, behind its own cache."""
    return self.device_caches[device][0].setdefault(key, Compiled())


def launches(target: str) -> Iterator[Callable[[], object]]:
    cpu, halves = torch.device("cpu"), (torch.bfloat16, torch.float16)
    tiles = TILES | (touch_all.SPECIALIZED if target == "sm_90" else {})
    for sizes in touch_all.SIZES:
        for tile in tiles.values():
            for dtype in halves if tile.specialize else (*halves, torch.float32):
                yield partial(touch_all.experts, *sizes, tile, dtype, cpu)
    for _, launch in [*compile_all.router(), *compile_all.experts(target)]:
        yield launch
    rows, offsets = torch.zeros(9, 64), torch.zeros(3, dtype=torch.int32)
    for scale in (1, 0.5):
        yield partial(grouped_wgrad, rows, rows, offsets, scale=scale, tile=TILES["pointers"])
    x = torch.zeros(65)
    for like in (x[:64], x[1:], x[:64].double()):
        yield partial(scaled, like, None)
        yield partial(scaled, x[1:], like)
    for like in (x[:64], x[:64].half()):
        for described in ("", "x", "out", "x out"):
            yield partial(copied, like, described=described)


def main(target: str) -> None:
    StandIn(target)
    triton.runtime.JITFunction._do_compile = compiled
    names = [module.name for module in iter_modules(ep_moe.kernels.__path__)]
    modules = [import_module(f"ep_moe.kernels.{name}") for name in names]
    kernels = {each for module in modules for each in vars(module).values() if type(each) is bound}
    count, found_for = 0, bound._compiled

    def checked(self: bound, form: object, kinds: object, tensors: Any, numbers: Any, last: Any):
        nonlocal count
        found = found_for(self, form, kinds, tensors, numbers, last)
        own = self.kernel.warmup(*tensors, *numbers, grid=(1, 1, 1), **last)
        assert found[0] is own, (self.kernel, kinds, numbers, last)
        kernels.discard(self)
        count += 1
        return found

    bound._compiled = checked
    for launch in launches(target):
        launch()
    print(count)
    print(*sorted(str(each.kernel) for each in kernels))


if __name__ == "__main__":
    main(sys.argv[1])
