"""A recorded routing in the benches: which part of it each rank takes, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ep_moe
from benchmarks import bench_layer, harness, trace
from benchmarks.trace import Replay
from benchmarks.variants import layer_of
from ep_moe import ConfigError, InputError
from ep_moe.parallel import Process
from ep_moe.testing import run_ranks
from ep_moe.traces import RoutingTrace
from tests.helpers import small_config

SHIPPED = sorted((Path(trace.__file__).parent / "traces").glob("*.npz"))
TOKENS = 12
CONFIG = small_config(num_experts=4, top_k=2)
ALONE = Process(0, 0, 1, torch.device("cpu"), None)


@pytest.fixture
def path(tmp_path):
    """Layer 3 is even; in layer 5 expert 0 takes every token."""
    token = torch.arange(TOKENS)
    even = torch.stack([token % 4, (token + 2) % 4], dim=1)
    skewed = torch.stack([torch.zeros_like(token), token % 3 + 1], dim=1)
    ids = torch.stack([even, skewed]).to(torch.int8).repeat(2, 1, 1, 1)
    gates = torch.rand(ids.shape).half()
    trace = RoutingTrace(4, (10, 20), (3, 5), ids, gates, origin={"device": "some GPU"})
    trace.save(tmp_path / "some.npz")
    return tmp_path / "some.npz"


def load(path, moe=CONFIG, *, step=None, layer=None):
    return Replay.load(path, moe, step=step, layer=layer)


def rank(number, ranks):
    return Process(number, number, ranks, torch.device("cpu"), None)


def test_the_last_step_and_the_first_layer_unless_told(path):
    found = load(path)
    assert (found.name, found.step, found.layer) == ("some", 20, 3)
    assert load(path, layer=5, step=10).routing.ids[:, 0].tolist() == [0] * TOKENS
    with pytest.raises(InputError, match=r"layer is 4, .* the trace holds: \[3, 5\]"):
        load(path, layer=4)


@pytest.mark.parametrize("ranks, tokens", [(1, 12), (1, 5), (2, 6), (3, 4), (4, 1)])
def test_ranks_take_contiguous_shares(path, ranks, tokens):
    replay = load(path, layer=5)
    shares = [replay.share(tokens, rank(r, ranks)) for r in range(ranks)]
    ids = torch.cat([share.ids for share in shares])
    gates = torch.cat([share.gate_weights for share in shares])
    assert torch.equal(ids, replay.routing.ids[: ranks * tokens])
    assert torch.equal(gates, replay.routing.gate_weights[: ranks * tokens])
    shares[0].ids.fill_(-7)  # of its own memory
    assert replay.routing.ids.min() >= 0


def test_tokens_are_not_repeated(path):
    message = r"tokens = 5, but it must be at most 4: the trace holds 12 tokens for 3 rank\(s\)"
    with pytest.raises(ConfigError, match=message):
        load(path).share(5, rank(0, 3))


def test_the_case_tells_how_uneven_what_is_replayed_is(path):
    even, skewed = load(path), load(path, layer=5)
    assert even.case(4, 2) == {
        "trace": "some",
        "trace_step": 20,
        "trace_layer": 3,
        "max_vio": 0.0,
        "busiest_rank": 1.0,
    }
    # 12 + 4 of 24 choices go to experts 0 and 1, 12 of them to one of four experts
    assert skewed.case(6, 2)["busiest_rank"] == pytest.approx(16 / 12, abs=1e-3)
    assert skewed.case(12, 1) | {"max_vio": 1.0, "busiest_rank": 1.0} == skewed.case(12, 1)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_experts": 8}, r"\(moe.num_experts, moe.top_k\) = \(8, 2\), but .* \(4, 2\)"),
        ({"top_k": 1, "renormalize": False}, r"= \(4, 1\), but it must be \(4, 2\), as in"),
        ({"forced_routing": "balanced"}, "forced_routing = 'balanced', but it must be 'none' with"),
        ({"capacity_factor": 1.5}, r"capacity_factor = 1\.5, but it must be None with a trace"),
    ],
)
def test_another_layer_is_refused(path, changes, message):
    with pytest.raises(ConfigError, match=message):
        load(path, small_config(**{"num_experts": 4} | changes))


def test_a_trace_with_dropped_choices_is_refused(path):
    whole = RoutingTrace.load(path)
    whole.ids[1, 0, 3] = -1
    whole.save(path)
    with pytest.raises(ConfigError, match=r"with 2 choices that go nowhere', .* one without"):
        load(path)
    assert load(path, step=10).step == 10


def test_a_layer_replays_the_choices_with_its_own_weights(path):
    routing = load(path, layer=5).share(TOKENS, ALONE)
    layer = ep_moe.MoELayer(CONFIG)
    sent = layer_of(CONFIG, layer, tokens=TOKENS, process=ALONE, routing=routing)
    x = torch.randn(TOKENS, 16)
    with ep_moe.record_routing() as record:
        y, stats = sent(x)
    assert torch.equal(record.choices[0].ids, routing.ids)
    assert stats.tokens_per_expert.tolist() == [12, 4, 4, 4]
    assert not torch.equal(y, layer(x)[0])


def test_the_table_shows_each_step_and_layer(path, capsys):
    trace.main([str(path)])
    printed = capsys.readouterr().out
    assert "4 experts, top_k 2, 12 tokens a step" in printed
    assert "device: some GPU" in printed
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    assert rows[0] == "| step | layer | MaxVio | busiest of 2 ranks | busiest of 4 ranks |"
    assert rows[2:] == [
        f"| {step} | {figures} |"
        for step in (10, 20)
        for figures in ("3 | 0.00 | 1.00 | 1.00", "5 | 1.00 | 1.33 | 2.00")
    ]


@pytest.mark.parametrize("name, message", [("none.npz", "No such file"), ("bad.npz", "no npz")])
def test_the_command_names_a_wrong_file(tmp_path, capsys, name, message):
    (tmp_path / "bad.npz").write_text("text")
    with pytest.raises(SystemExit):
        trace.main([str(tmp_path / name)])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_traces_are_small_real_and_uneven(path):
    assert path.stat().st_size <= 3 * 2**20
    shipped = RoutingTrace.load(path)
    assert shipped.tokens_per_step >= 8192
    assert {"device", "corpus_digest", "commit", "torch"} <= shipped.origin.keys()
    moe = small_config(num_experts=shipped.num_experts, top_k=shipped.top_k)
    for step in shipped.steps:
        for layer in shipped.layers:
            figures = load(path, moe, step=step, layer=layer).case(2048, 8)
            assert figures["busiest_rank"] > 1.02
            assert figures["max_vio"] > 0.1


def bench(path, process, results, **changes):
    config = bench_layer.LayerBench(
        moe=CONFIG,
        trace=str(path),
        trace_layer=5,
        windows_ms=(0.1,),
        rest_ms=0,
        rounds=1,
        dtype="float32",
        results=str(results),
        **{"tokens": (6,), "peers": ("torch_loop",), "profiled_calls": 1} | changes,
    )
    return bench_layer.Bench.start(config, process)


def set_up(run, tokens):
    (load,) = run.loads
    routing = load and load.share(tokens, run.process)
    return run.set_up(run.make_inputs(tokens), load, routing)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setitem(harness._COPY_BYTES, "cpu", 2**16)
    monkeypatch.setitem(harness._MATMUL_SIZE, "cpu", 32)


def test_a_run_names_its_trace(path, tmp_path, quick, capsys):
    bench(path, ALONE, tmp_path / "results").run()
    assert "skipped" not in capsys.readouterr().out  # the peers agree on the recorded routing
    for name in ("layer", "layer_stages"):
        lines = (tmp_path / "results" / f"{name}.jsonl").read_text().splitlines()
        cases = [json.loads(line)["case"] for line in lines]
        assert {(c["trace"], c["trace_step"], c["trace_layer"]) for c in cases if "scope" in c} == {
            ("some", 20, 5)
        }


def test_both_scopes_route_by_the_trace(path, tmp_path):
    run = bench(path, ALONE, tmp_path)
    setting = set_up(run, 6)
    assert len({i.x.data_ptr() for i in setting.inputs}) == len(setting.inputs) > 1
    assert setting.routing.ids[:, 0].tolist() == [0] * 6
    for i in setting.inputs:
        with ep_moe.record_routing() as record:
            setting.layer(i.x)
            setting.layer(i.x)  # again and again
        assert [c.ids[:, 0].tolist() for c in record.choices] == [[0] * 6] * 2


def test_without_a_trace_nothing_is_said_of_one(tmp_path):
    run = bench_layer.Bench.start(bench_layer.LayerBench(moe=CONFIG, dtype="float32"), ALONE)
    setting = set_up(run, 4)
    assert "trace" not in run.case("layer", "forward", setting)
    assert setting.routing is None


def test_two_ranks_replay_their_parts(path, tmp_path):
    (first, case), (second, _) = run_ranks(_replay_on_two_ranks, 2, path, tmp_path)
    ids = load(path, layer=5).routing.ids
    assert torch.equal(torch.cat([first, second]), ids)
    assert case["busiest_rank"] == pytest.approx(16 / 12, abs=1e-3)
    measured = [json.loads(line) for line in (tmp_path / "layer.jsonl").read_text().splitlines()]
    assert {
        (r["case"]["trace"], r["case"]["ranks"]) for r in measured if r["impl"] == "ep_moe"
    } == {("some", 2)}


def _replay_on_two_ranks(rank, path, results):
    process = Process(rank, rank, 2, torch.device("cpu"), dist.group.WORLD)
    run = bench(path, process, results, peers=(), profiled_calls=0)
    setting = set_up(run, 6)
    with ep_moe.record_routing() as record:
        setting.layer(setting.inputs[0].x)
    run.time_layer(setting, "forward+backward")
    return record.choices[0].ids, run.case("layer", "forward", setting)


def test_a_trace_too_short_is_refused_before_anything_is_timed(path, tmp_path):
    with pytest.raises(ConfigError, match="tokens = 13, but it must be at most 12"):
        bench(path, ALONE, tmp_path / "results", tokens=(4, 13))
    assert not (tmp_path / "results").exists()


def test_a_step_without_a_trace_is_refused():
    with pytest.raises(ConfigError, match="trace_step = 3, but it must be unset without a trace"):
        bench_layer.LayerBench(moe=CONFIG, trace_step=3)


def test_the_command_says_what_does_not_fit(path, tmp_path):
    moe = ["--moe.hidden_size=16", "--moe.intermediate_size=8", "--moe.num_experts=8"]
    with pytest.raises(SystemExit, match=r"bench_layer.py: \(moe.num_experts, moe.top_k\) = \(8,"):
        bench_layer.main([*moe, "--moe.top_k=2", f"--trace={path}", f"--results={tmp_path}"])
