"""What the interpreter would take and a GPU would not."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch

from ep_moe.kernels import device
from ep_moe.kernels.device import leaving
from ep_moe.kernels.tiles import Tile, programs, takes_descriptors

GOOD = torch.empty(4, 8)
REFUSED = {
    "rows of 24 bytes": torch.empty(4, 6),
    "not aligned": torch.empty(33)[1:].view(4, 8),
    "no rows": torch.empty(0, 8),
    "no columns": torch.empty(4, 0),
}


@pytest.mark.parametrize("bad", REFUSED.values(), ids=REFUSED.keys())
def test_what_a_descriptor_cannot_address(bad):
    assert takes_descriptors(GOOD, None, GOOD.half())
    assert not takes_descriptors(GOOD, bad)
    assert not takes_descriptors(bad, None)


def test_programs_are_at_most_one_a_tile(monkeypatch):
    monkeypatch.setattr("ep_moe.kernels.tiles.multiprocessors", lambda device: 7)
    twice = Tile(16, 16, 16, warps=4, stages=2, per_sm=2)
    assert [programs(twice, tiles, GOOD.device) for tiles in (1, 13, 14, 99)] == [1, 13, 14, 14]


def test_programs_leave_multiprocessors_to_others(monkeypatch):
    monkeypatch.setattr("ep_moe.kernels.tiles.multiprocessors", lambda device: 7)
    twice = Tile(16, 16, 16, warps=4, stages=2, per_sm=2)
    found = []
    for sms in (0, 2, 6, 7, 99):
        with leaving(sms):
            found.append(programs(twice, 99, GOOD.device))
            assert programs(twice, 1, GOOD.device) == 1
    assert found == [14, 10, 2, 2, 2]
    assert programs(twice, 99, GOOD.device) == 14


def test_each_gpu_is_asked_once(monkeypatch):
    asked = []

    def properties(index):
        asked.append(index)
        return SimpleNamespace(major=9, minor=index, multi_processor_count=100 + index)

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(device, "_asked", cache(device._asked.__wrapped__))
    for current in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        for index in (0, 1):
            gpu = torch.device("cuda", index)
            assert device.multiprocessors(gpu) == 100 + index
            assert device.architecture(gpu) == f"sm_9{index}"
        assert device.multiprocessors(torch.device("cuda")) == 100 + current
    assert asked == [0, 1]
