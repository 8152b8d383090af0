import json
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import ep_moe
from benchmarks import bench_layer
from benchmarks.peers import PEERS

MOE = ["--moe.hidden_size=16", "--moe.intermediate_size=8", "--moe.num_experts=4", "--moe.topk=2"]
SHORT = ["--tokens=[6]", "--windows_ms=[0.1]", "--rest_ms=0", "--rounds=1", "--dtype=float32"]


_Experts = namedtuple("_Experts", "w_gate_up w_down")


def _swiglu_of_swapped(up_gate):
    up, gate = up_gate.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setitem(bench_layer.harness._COPY_BYTES, "cpu", 2**16)
    monkeypatch.setitem(bench_layer.harness._MATMUL_SIZE, "cpu", 32)

    def run(*argv):
        bench_layer.main([*MOE, *SHORT, f"--results={tmp_path}", *argv])
        files = {path.stem: path.read_text().splitlines() for path in tmp_path.iterdir()}
        return {name: [json.loads(line) for line in lines] for name, lines in files.items()}

    return run


def test_a_run_records_ours_the_peers_the_ceilings_and_the_stages(records, capsys):
    found = records("--moe.num_shared_experts=1", "--peers=[torch_loop]")
    printed = capsys.readouterr().out
    assert "skipped" not in printed
    assert "## layer_stages" in printed
    measured = {(r["case"].get("scope"), r["impl"]) for r in found["layer"]}
    assert measured == {
        (None, "ceiling"),
        ("layer", "ep_moe"),
        ("moe", "ep_moe"),
        ("moe", "torch_loop"),
        ("moe", "ceiling: dense"),
    }
    assert {r["case"].get("direction") for r in found["layer"]} == {
        None,
        "forward",
        "forward+backward",
    }
    stages = {r["metric"] for r in found["layer_stages"]}
    forward = {"route", "dispatch", "experts", "experts/permute", "combine"}
    assert forward | {"experts_backward", "other", "total"} <= stages


def test_a_peer_that_differs_is_named_and_not_timed(records, capsys, monkeypatch):
    real = PEERS["torch_loop"]

    def doubled(config, experts):
        peer = real(config, experts)
        return replace(peer, run=lambda *inputs: 2 * peer.run(*inputs))

    monkeypatch.setitem(PEERS, "torch_loop", doubled)
    found = records("--peers=[torch_loop]", "--directions=[forward]")
    assert "skipped torch_loop: its forward is 1.0e+00 from ours" in capsys.readouterr().out
    assert "torch_loop" not in {r["impl"] for r in found["layer"]}


def test_a_peer_may_hold_the_weights_in_another_layout(records, capsys, monkeypatch):
    real = PEERS["torch_loop"]

    def swapped(config, experts):
        """Gate and up rows change places in its copy, and change back in what it computes."""
        copy = experts.w_gate_up.detach().roll(config.intermediate_size, 1).requires_grad_()
        inner = replace(
            real(config, _Experts(copy, experts.w_down)), weights=(copy, experts.w_down)
        )
        return replace(
            inner, ours=lambda d_w1, d_w2: (d_w1.roll(config.intermediate_size, 1), d_w2)
        )

    monkeypatch.setitem(PEERS, "torch_loop", swapped)
    monkeypatch.setattr("benchmarks.peers.plain._swiglu", _swiglu_of_swapped)
    found = records("--peers=[torch_loop]")
    assert "skipped" not in capsys.readouterr().out
    timed = {r["case"]["direction"] for r in found["layer"] if r["impl"] == "torch_loop"}
    assert timed == {"forward", "forward+backward"}


def test_a_peer_without_a_backward_is_timed_in_the_forward_only(records, capsys, monkeypatch):
    real = PEERS["torch_loop"]
    monkeypatch.setitem(PEERS, "torch_loop", lambda *args: replace(real(*args), trains=False))
    found = records("--peers=[torch_loop]")
    assert "skipped torch_loop: it has no backward" in capsys.readouterr().out
    timed = {r["case"]["direction"] for r in found["layer"] if r["impl"] == "torch_loop"}
    assert timed == {"forward"}


def test_the_forward_of_the_experts_has_the_rate_of_the_weights_that_its_ids_touch(records):
    found = records("--peers=[torch_loop]", "--moe.num_experts=64")
    rows = [r for r in found["layer"] if r["metric"] == "touched"]
    assert {(r["impl"], r["case"]["scope"], r["case"]["direction"]) for r in rows} == {
        ("ep_moe", "moe", "forward"),
        ("torch_loop", "moe", "forward"),
    }


def test_touched_bytes_are_of_each_chosen_expert_once_and_the_mean_over_the_input_sets():
    config = ep_moe.MoEConfig(hidden_size=2, intermediate_size=3, num_experts=5, top_k=2)
    ids = [torch.tensor([[0, 4], [4, 0]]), torch.tensor([[0, 1], [2, 3]])]
    of_expert = 4 * (2 * 3 * 2 + 3 * 2)
    assert bench_layer.touched_bytes(ids, ep_moe.MoELayer(config).experts) == 3 * of_expert


@pytest.mark.gpu
@pytest.mark.usefixtures("require_gpu")
def test_alive_bytes_are_what_a_forward_keeps_and_x_but_not_y():
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    assert bench_layer.alive_bytes(lambda: x * 2, x) == x.nbytes  # x itself
    assert bench_layer.alive_bytes(lambda: (x * 2).relu() * 3, x) == 2 * x.nbytes  # and relu's


def test_operations():
    moe = ep_moe.MoEConfig(
        hidden_size=2, intermediate_size=3, num_experts=5, top_k=4, num_shared_experts=1
    )
    experts, shared, router = 6 * 2 * 3 * 4, 6 * 2 * 3, 2 * 2 * 5
    assert bench_layer.operations(moe, 7, "moe", "forward") == 7 * experts
    whole = experts + shared + router
    assert bench_layer.operations(moe, 7, "layer", "forward+backward") == 3 * 7 * whole


@pytest.mark.parametrize(
    "field, value, rule",
    [
        ("tokens", (0, 4), "above 0"),
        ("rounds", 0, "above 0"),
        ("windows_ms", (), "above 0"),
        ("peers", ("megablocks",), "among .*torch_loop"),
    ],
)
def test_a_wrong_value_is_named(field, value, rule):
    moe = ep_moe.MoEConfig(hidden_size=2, intermediate_size=3, num_experts=5, top_k=4)
    with pytest.raises(ep_moe.ConfigError, match=f"{field} = .*{rule}"):
        bench_layer.LayerBench(moe=moe, **{field: value})
