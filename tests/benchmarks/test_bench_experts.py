import json

import torch

import ep_moe
from benchmarks import bench_experts
from ep_moe import tune

ARGS = [
    *("--moe.hidden_size=16", "--moe.intermediate_size=8", "--moe.num_experts=4", "--moe.topk=2"),
    *("--tokens=[12]", "--windows_ms=[0.1]", "--rest_ms=0", "--rounds=1", "--dtype=float32"),
]


def test_a_run_records_every_part_and_what_stands_beside_it(tmp_path, capsys):
    bench_experts.main([*ARGS, f"--results={tmp_path}"])
    assert "## experts" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "experts.jsonl").read_text().splitlines()]
    found = {(r["case"]["scope"], r["case"]["part"], r["impl"]) for r in rows}
    assert {part for scope, part, _ in found if scope == "product"} == {
        "hidden",
        "product",
        "gradient",
        "dgrad",
        "wgrad of gate and up",
        "wgrad of down",
    }
    assert {part for scope, part, _ in found if scope == "move"} == {
        "pack",
        "weighted sum",
        "sum",
        "gather",
    }
    assert {impl for scope, _, impl in found if scope == "forward"} == {
        "ep_moe",
        "loop over experts",
        "+ grouped products",
        "+ one sum",
        "+ fused activation",
    }
    assert {r["unit"] for r in rows} >= {"ms", "TFLOP/s", "TB/s"}


def test_the_work_of_the_products_is_that_of_forward_and_backward():
    config = ep_moe.MoEConfig(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2)
    flow = tune.operands(config, 12, 1, torch.float32, torch.device("cpu"))
    parts = list(bench_experts.products(flow, config))
    assert sum(part.work for part in parts) == 3 * 6 * 24 * 16 * 8
    (forward,) = bench_experts.forwards(flow, config)
    assert forward.work == 6 * 24 * 16 * 8


def test_a_wrong_variant_is_not_timed(tmp_path, monkeypatch, capsys):
    right = bench_experts.ops.weighted_sum_ref
    monkeypatch.setattr(bench_experts.ops, "weighted_sum_ref", lambda *args: 1.1 * right(*args))
    bench_experts.main([*ARGS, f"--results={tmp_path}", "--scopes=[forward]"])
    assert "its forward is" in capsys.readouterr().out
    assert "+ grouped products" not in (tmp_path / "experts.jsonl").read_text()
