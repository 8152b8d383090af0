"""The layer beside its variants and its parts: what each of them does, and what is recorded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

import ep_moe
from benchmarks import bench_layer, harness
from benchmarks.alone import COMMUNICATION, COMPUTE, take_apart
from benchmarks.bench_layer import Bench, LayerBench
from benchmarks.loads import Skewed
from benchmarks.variants import layer_of
from ep_moe import ConfigError
from ep_moe.parallel import Process
from ep_moe.routing import count_tokens
from ep_moe.testing import run_ranks
from tests.dispatch.windows import needs_interpreter, share_files
from tests.helpers import small_config

ROOT = Path(__file__).parent.parent.parent
TRACE = ROOT / "benchmarks" / "traces" / "bytes_e8_k2_cpu.npz"
ALONE = Process(0, 0, 1, torch.device("cpu"), None)
SHARED = small_config(num_shared_experts=1)
SHORT = {
    "tokens": (6,),
    "dtype": "float32",
    "windows_ms": (0.1,),
    "rest_ms": 0.0,
    "rounds": 1,
    "peers": (),
    "profiled_calls": 0,
}
CHUNKS, PLAIN = "ep_moe, pipeline_chunks 2", "ep_moe, shared_expert_overlap False"


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setitem(harness._COPY_BYTES, "cpu", 2**16)
    monkeypatch.setitem(harness._MATMUL_SIZE, "cpu", 32)


def test_two_ranks_record_the_layer_beside_its_variants_and_its_parts(tmp_path):
    """By the command itself: skews and a trace in one start."""
    moe = [f"--moe.{name}={getattr(SHARED, name)}" for name in ("hidden_size", "num_experts")]
    argv = ["--nproc-per-node", "2", "-m", "benchmarks.bench_layer", *moe]
    argv += ["--moe.intermediate_size=12", "--moe.topk=2", "--moe.num_shared_experts=1"]
    argv += ["--tokens=[6,5000]", "--windows_ms=[0.1]", "--rest_ms=0", "--rounds=1"]
    argv += ["--dtype=float32", "--profiled_calls=0", "--alone=true", f"--trace={TRACE}"]
    argv += ["--variants=[{pipeline_chunks: 2}, {shared_expert_overlap: false}]"]
    argv += ["--skews=[1,2.5]", "--directions=[forward+backward]", f"--results={tmp_path}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "skipped the trace: tokens = 5000, but it must be at most 4096" in done.stdout
    assert "## layer, beside its parts" in done.stdout
    lines = (tmp_path / "layer.jsonl").read_text().splitlines()
    of_case: dict = {}
    for r in map(json.loads, lines):
        case = r["case"]
        load = (case.get("tokens"), case.get("skew"), case.get("trace"))
        of_case.setdefault(load, {}).setdefault(r["impl"], {})[r["metric"]] = r["value"]
    del of_case[None, None, None]  # the ceilings
    assert set(of_case) == {
        (6, None, None),
        (6, 2.5, None),
        (6, None, TRACE.stem),
        (5000, None, None),
        (5000, 2.5, None),
    }
    for found in of_case.values():
        assert list(found) == ["ep_moe", CHUNKS, PLAIN, COMPUTE, COMMUNICATION]
        longest = max(found[COMPUTE]["time"], found[COMMUNICATION]["time"])
        for impl in ("ep_moe", CHUNKS, PLAIN):
            assert found[impl]["ratio"] == pytest.approx(found[impl]["time"] / longest)
        assert "ratio" not in found[COMPUTE].keys() | found[COMMUNICATION].keys()
        assert "TFLOP/s" in found[COMPUTE]
        assert "TFLOP/s" not in found[COMMUNICATION]


class Counted:
    """A transport whose moves are counted."""

    def __init__(self, transport, made):
        self.transport, self.made = transport, made

    def __getattr__(self, name):
        found = getattr(self.transport, name)
        if name not in ("dispatch", "replay", "replay_gates", "combine", "combine_gates"):
            return found

        def move(*args, **kwargs):
            self.made.append(name)
            return found(*args, **kwargs)

        return move


def parts_on_ranks(rank, changes, window_files):
    """Of each direction: what computing alone gives beside the layer itself, and the moves that
    each makes."""
    share_files(window_files)
    torch.manual_seed(0)
    layer = ep_moe.MoELayer(small_config(num_shared_experts=1, **changes), ep=dist.group.WORLD)
    torch.manual_seed(rank)
    sets = [torch.randn(5 + rank, 16, requires_grad=True) for _ in range(2)]
    made = []

    def forward(x):
        with torch.no_grad():
            return (layer(x)[0],)

    def backward(x):
        y = layer(x)[0]
        return (y, *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y)))

    real, found = layer.transport, {}
    for run in (forward, backward):
        layer.transport = Counted(real, made)
        calls = [lambda x=x, run=run: run(x) for x in sets]
        expected = [call() for call in calls]
        parts = take_apart(layer, calls)
        noted = tree_leaves([[m.given, m.brought] for m in parts.moves])
        assert not any(t.requires_grad for t in noted if isinstance(t, torch.Tensor))  # no graph
        made.clear()
        twice = [compute() for _ in range(2) for compute in parts.compute]
        in_compute = list(made)
        for got, want in zip(twice, [*expected, *expected], strict=True):
            assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
        for communicate in parts.communication:
            made.clear()
            communicate()
        found[run.__name__] = (in_compute, list(made))
        implementations = parts.implementations(lambda output: None)
        implementations[COMMUNICATION].check(parts.communication[0]())
        wrong = [None if v is None else v * 1.1 for v in parts.communication[0]()]
        with pytest.raises(harness.Disagreement, match="bring something else"):
            implementations[COMMUNICATION].check(wrong)
    return found


MOVES = [
    {"transport": "collective"},
    {"transport": "collective", "numerics": "exact", "shared_expert_overlap": False},
    pytest.param({"transport": "symm", "max_tokens_per_rank": 7}, marks=needs_interpreter),
]


@pytest.mark.parametrize("changes", MOVES, ids=lambda c: " ".join(map(str, c.values())))
def test_the_parts_compute_without_a_move_and_move_without_computing(changes, tmp_path):
    back = ["dispatch", "combine", "replay", "combine", "combine_gates"]
    for found in run_ranks(parts_on_ranks, 2, changes, str(tmp_path)):
        assert found == {"forward": ([], ["dispatch", "combine"]), "backward": ([], back)}


def on_ranks_of_symm(rank, folder):
    share_files(folder)
    harness._COPY_BYTES["cpu"], harness._MATMUL_SIZE["cpu"] = 2**16, 32
    harness.input_sets = lambda *_: 1
    process = Process(rank, rank, 2, torch.device("cpu"), dist.group.WORLD)
    moe = small_config(num_shared_experts=1, transport="symm")
    changes = {"tokens": (1, 3), "variants": ({"transport": "collective"},), "alone": True}
    changes["directions"] = ("forward",)  # the interpreter is slow
    bench = Bench.start(LayerBench(moe=moe, results=folder, **SHORT | changes), process)
    bench.run()
    setting = bench.set_up(bench.make_inputs(1), None, None)
    return [layer.transport.max_tokens for layer in (bench.layer, setting.layer, setting.apart())]


@needs_interpreter
def test_each_number_of_tokens_is_the_bound_of_a_transport_that_wants_one(tmp_path):
    assert run_ranks(on_ranks_of_symm, 2, str(tmp_path)) == [[3, 1, 1]] * 2
    lines = (tmp_path / "layer.jsonl").read_text().splitlines()
    found = {(r["case"].get("tokens"), r["impl"]) for r in map(json.loads, lines)}
    impls = ("ep_moe", "ep_moe, transport collective", COMPUTE, COMMUNICATION)
    assert found - {(None, "ceiling")} == {(t, impl) for t in (1, 3) for impl in impls}


def test_the_layers_beside_each_other_hold_the_same_weights():
    changes = {"variants": ({"experts_keep": "rows"}, {"numerics": "exact"})}
    moe = small_config(num_shared_experts=1, expert_bias=True, mlp_bias=True)
    bench = Bench.start(LayerBench(moe=moe, **SHORT | changes), ALONE)
    setting = bench.set_up(bench.make_inputs(4), None, None)
    layers = [setting.layer, setting.apart(), *setting.others.values()]
    assert [layer.config.experts_keep for layer in layers[2:]] == ["rows", "pre_activation"]
    assert [layer.config.numerics for layer in layers[2:]] == ["fast", "exact"]
    mine = dict(bench.layer.named_parameters()) | dict(bench.layer.named_buffers())
    for layer in layers:
        theirs = dict(layer.named_parameters()) | dict(layer.named_buffers())
        assert theirs.keys() == mine.keys()
        assert all(theirs[name] is mine[name] for name in mine)


def test_a_variant_that_cannot_be_made_is_named_before_anything_is_timed():
    config = LayerBench(moe=small_config(), **SHORT | {"variants": ({"transport": "symm"},)})
    with pytest.raises(ConfigError, match="transport = 'symm'"):
        Bench.start(config, ALONE)


@pytest.mark.usefixtures("quick")
def test_a_variant_that_computes_something_else_is_named_and_not_timed(
    tmp_path, monkeypatch, capsys
):
    def wrong(moe, like, **where):
        layer = layer_of(moe, like, **where)
        if moe.experts_keep == "rows":
            layer.experts.w_down = torch.nn.Parameter(layer.experts.w_down.detach() * 1.1)
        return layer

    monkeypatch.setattr(bench_layer, "layer_of", wrong)
    changes = {"variants": ({"experts_keep": "rows"},), "alone": True, "results": str(tmp_path)}
    Bench.start(LayerBench(moe=small_config(), **SHORT | changes), ALONE).run()
    printed = capsys.readouterr().out
    assert "skipped the parts alone: on one rank nothing travels" in printed
    for direction in ("forward", "forward+backward"):
        assert f"skipped ep_moe, experts_keep rows: its {direction} is" in printed
    lines = (tmp_path / "layer.jsonl").read_text().splitlines()
    assert {r["impl"] for r in map(json.loads, lines)} == {"ep_moe", "ceiling", "ceiling: dense"}


def test_a_skew_is_the_load_of_the_busiest_expert_over_the_mean():
    load = Skewed(small_config(), 3.0)
    routing = load.share(4000, ALONE)
    counts = count_tokens(routing.ids, 8).float()
    assert float(counts.max() / counts.mean()) == pytest.approx(3, rel=0.05)
    assert routing.gate_weights.unique().tolist() == [0.5]
    first = float(counts[:4].sum() / 4000)  # of two ranks, which have 4,000 choices each
    assert load.case(4000, 2) == {"skew": 3.0, "busiest_rank": pytest.approx(first, abs=1e-3)}
    layer = ep_moe.MoELayer(small_config())
    sent = layer_of(layer.config, layer, tokens=4000, process=ALONE, routing=routing)
    assert torch.equal(sent(torch.randn(4000, 16))[1].tokens_per_expert.float(), counts)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"skews": (0.5,)}, r"skews = \(0.5,\), but it must be between 1 and .* = 4"),
        ({"skews": (1.0, 4.5)}, "skews = .* = 4"),
        ({"variants": ({"top_k": 1},)}, r"variants = \['top_k'\].* pipeline_chunks"),
        ({"variants": ({"pipeline_chunks": 0},)}, "pipeline_chunks = 0.* at least 1"),
        ({"variants": ({"pipeline_chunks": "2"},)}, "pipeline_chunks = '2'.* type int"),
        ({"variants": ({"pipeline_chunks": 1},)}, "variants = .* different from the layer"),
        ({"variants": ({"pipeline_chunks": 2},) * 2}, "variants = .* from each other"),
        (
            {"moe": small_config(max_tokens_per_rank=5)},
            "moe.max_tokens_per_rank = 5, but it must be unset, or at least 6",
        ),
        (
            {"moe": small_config(forced_routing="balanced"), "skews": (2.0,)},
            "moe.forced_routing = 'balanced'",
        ),
        ({"moe": small_config(capacity_factor=2.0), "skews": (2.0,)}, "moe.capacity_factor"),
    ],
)
def test_a_wrong_option_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        LayerBench(**{"moe": small_config()} | SHORT | changes)
