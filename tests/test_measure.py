import pytest
import torch

import ep_moe
from ep_moe.measure import kernels_of, profile_stages, stage_times


def event(cat, name, ts, dur, tid=1, **args):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 0,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


# µs: a range that is not measured, then measured [ route [ ] experts [ permute [ ] ] ... ]
RANGES = [
    event("user_annotation", "ep_moe.route", -5_000, 1_000),
    event("user_annotation", "ep_moe_measured", 0, 10_000),
    event("user_annotation", "ep_moe.route", 0, 1_000),
    event("user_annotation", "ep_moe.experts", 2_000, 4_000),
    event("user_annotation", "ep_moe.permute", 2_000, 1_500),
    event("cpu_op", "aten::mm", 2_000, 500),
    {"ph": "M", "name": "process_name", "pid": 0, "args": {}},
]


def test_on_a_cpu_a_stage_is_the_time_in_its_range():
    assert stage_times(RANGES, on_gpu=False) == {
        "route": 1.0,
        "experts": 4.0,
        "experts/permute": 1.5,
        "other": 5.0,
        "total": 10.0,
    }


def test_on_a_gpu_a_stage_is_the_kernels_launched_in_it():
    backward = event("user_annotation", "ep_moe.experts_backward", 500, 1_000, tid=2)
    launched = [  # (launch at, launching thread, ms on the device)
        (-4_500, 1, 8.0),  # before the first call that counts
        (100, 1, 0.25),  # in route, although the backward's thread is in a range at that time
        (600, 2, 2.0),  # in the backward
        (2_100, 1, 0.5),  # in permute, and so in experts
        (5_000, 1, 1.0),  # in experts
        (7_000, 1, 4.0),  # in none
    ]
    kernels = []
    for i, (ts, tid, ms) in enumerate(launched):
        kernels.append(event("cuda_driver", "cuLaunchKernelEx", ts, 5, tid=tid, correlation=i))
        kernels.append(event("kernel", "k", ts + 50_000, ms * 1e3, tid=7, correlation=i))
    assert stage_times([*RANGES, backward, *kernels], on_gpu=True) == {
        "route": 0.25,
        "experts_backward": 2.0,
        "experts": 1.5,
        "experts/permute": 0.5,
        "other": 4.0,
        "total": 7.75,
    }


def test_every_range_of_a_layer_is_found(device):
    process = ep_moe.Process(0, 0, 1, device, None)
    config = ep_moe.MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)
    layer = ep_moe.MoELayer(config).to(device)
    x = torch.randn(6, 8, device=device, requires_grad=True)
    with profile_stages(process) as times:
        layer(x)[0].sum().backward()
    # On one GPU dispatch and combine launch nothing: arrived rows are x.
    moved = () if device.type == "cuda" else ("dispatch", "combine")
    for stage in ("route", "experts", "experts/permute", *moved):
        assert times[stage] > 0, stage
        assert times["/".join(f"{part}_backward" for part in stage.split("/"))] > 0, stage
    assert times["experts/permute"] < times["experts"]
    assert times["other"] >= 0
    stages = sum(ms for name, ms in times.items() if "/" not in name and name != "total")
    assert stages == pytest.approx(times["total"])


@pytest.mark.gpu
@pytest.mark.usefixtures("require_gpu")
def test_kernels_copies_and_fills_of_a_call_are_counted():
    x = torch.ones(8, device="cuda")
    assert kernels_of(lambda: None) == []
    assert len(kernels_of(lambda: x.add(1).mul(2))) == 2
    assert len(kernels_of(lambda: x.zero_().copy_(x + 1))) == 3
