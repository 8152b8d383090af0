"""The whole layer, forward and forward+backward, on any number of ranks:

    python -m benchmarks.bench_layer --moe configs/qwen3_30b_a3b.yaml --tokens '[4096,16384]'
    torchrun --standalone --nproc-per-node 8 -m benchmarks.bench_layer --moe configs/olmoe.yaml
    python -m benchmarks.bench_layer --moe LAYER.yaml --trace benchmarks/traces/NAME.npz
    torchrun --standalone --nproc-per-node 2 -m benchmarks.bench_layer --moe LAYER.yaml \
        --moe.transport symm --skews '[1,2,5]' --alone true --variants '[{pipeline_chunks: 2}]'

Scope `layer` goes from x to y, with router and shared experts. Scope `moe`, on one rank, goes from
x, ids and gate weights to y, as do the peers beside it. `forward` runs without autograd;
`forward+backward` ends with the gradients of x, of the gate weights (scope moe) and of all weights.

With a trace, tokens go where those of a real training run went. Scope `moe` takes its ids and gate
weights; scope `layer` takes its ids and computes logits, gate weights and losses from x, which is
random, but does not sort the logits to choose. With skews they go where the busiest expert has so
many times the mean load, in the same way.

Over several ranks `alone` measures, beside the layer, its computing without the moves and its moves
without the computing (`benchmarks.alone`), and records ratio: the layer's time by the longer of the
two, at best 1. Variants are the same layer, of the same weights, with other options, beside it.

TFLOP/s are per rank and count 6*H*I*K*T operations for the routed experts of T tokens per rank, in
scope layer also 6*H*J*T for shared experts of width J and 2*H*E*T for the router; three times that
with the backward. tokens/s are of all ranks together. The time is the slowest rank's.

Scope `moe` has two more. touched, of the forward: bytes of the weights of the experts that an input
set's ids name (the mean over the sets) by the time. alive, of forward+backward on a GPU: x and all
that a forward leaves allocated for its backward, such as rows, activations and indices; not y, not
the ids and gate weights that it was given, and not the weights or a peer's copy of them.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

import ep_moe
from benchmarks import harness, report
from benchmarks.alone import COMMUNICATION, COMPUTE, take_apart
from benchmarks.harness import Disagreement, Implementation, Method, Metrics, Window, say
from benchmarks.loads import Load, Skewed
from benchmarks.peers import (
    PACKAGES,
    PEERS,
    Peer,
    Unavailable,
    dense_products,
    error_limit,
    largest_error,
)
from benchmarks.records import Recorder
from benchmarks.rows import CEILING, OURS, latest_rows
from benchmarks.trace import Replay
from benchmarks.variants import bounded, layer_of, variants_of
from ep_moe.config import parse_args
from ep_moe.measure import profile_stages
from ep_moe.parallel import Process

Direction = Literal["forward", "forward+backward"]
Outputs = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class LayerBench:
    """Time one MoE layer, with its peers beside it where there is one rank.

    Args:
        moe: the layer; its forced_routing and forced_skew choose how tokens spread. Without
            max_tokens_per_rank a transport that wants it is told each number of tokens
        model: what the tables call it
        trace: a recorded routing to replay (`python -m benchmarks.trace` shows what it holds)
        trace_step: one of the optimizer steps in it, by default the last
        trace_layer: one of the layers in it, by default the first
        skews: loads of the busiest expert over the mean, one measurement each, and then the trace
            if there is one; 1 = where the logits say. By default the trace, or what `moe` says
        variants: changes to `moe`, each measured beside it, such as {pipeline_chunks: 2}
        alone: on several ranks, also computing alone and communicating alone
        tokens: tokens on each rank (T), one measurement each
        dtype: of tokens and weights
        directions: forward, forward+backward
        methods: events and graph on a GPU (graph leaves out what cannot be captured), wall on a
            CPU; by default events or wall
        windows_ms: lengths of the timed windows; a GPU at its power limit is slower in long ones
        rest_ms: idle time before each window
        rounds: windows of each length for each implementation
        peers: those to run beside ours on one rank
        profiled_calls: calls under the profiler for the breakdown into stages; 0 = no breakdown
        results: folder where the records are appended
        seed: of weights and inputs
    """

    moe: ep_moe.MoEConfig
    model: str = "custom"
    trace: str | None = None
    trace_step: int | None = None
    trace_layer: int | None = None
    skews: tuple[float, ...] = ()
    variants: tuple[dict[str, Any], ...] = ()
    alone: bool = False
    tokens: tuple[int, ...] = (1024, 4096)
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    directions: tuple[Direction, ...] = get_args(Direction)
    methods: tuple[Method, ...] = ()
    windows_ms: tuple[float, ...] = (300.0, 40.0)
    rest_ms: float = 500.0
    rounds: int = 5
    peers: tuple[str, ...] = tuple(PEERS)
    profiled_calls: int = 5
    results: str = "benchmarks/results"
    seed: int = 0

    def __post_init__(self) -> None:
        positive = {"tokens": self.tokens, "windows_ms": self.windows_ms, "rounds": (self.rounds,)}
        for name, values in positive.items():
            if not values or min(values) <= 0:
                raise ep_moe.ConfigError(name, getattr(self, name), "above 0")
        for name in ("trace_step", "trace_layer"):
            if self.trace is None and getattr(self, name) is not None:
                raise ep_moe.ConfigError(name, getattr(self, name), "unset without a trace")
        if unknown := sorted(set(self.peers) - set(PEERS)):
            raise ep_moe.ConfigError("peers", unknown, f"among {sorted(PEERS)}")
        most = self.moe.max_tokens_per_rank
        if most is not None and most < max(self.tokens):
            rule = f"unset, or at least {max(self.tokens)}, the most of `tokens`"
            raise ep_moe.ConfigError("moe.max_tokens_per_rank", most, rule)
        limit = self.moe.num_experts / self.moe.top_k
        if self.skews and not 1 <= min(self.skews) <= max(self.skews) <= limit:
            rule = f"between 1 and num_experts / top_k = {limit:g}"
            raise ep_moe.ConfigError("skews", self.skews, rule)
        for name, rule in {"forced_routing": "none", "capacity_factor": None}.items():
            if self.skews and (value := getattr(self.moe, name)) != rule:
                raise ep_moe.ConfigError(f"moe.{name}", value, f"{rule!r} with skews, which decide")
        variants_of(self.moe, self.variants)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def windows(self) -> list[Window]:
        return [
            Window(window_ms=ms, rest_ms=self.rest_ms, rounds=self.rounds) for ms in self.windows_ms
        ]


class Inputs(NamedTuple):
    """One input set: x (T,H) and the gradient of y, other data on each rank and in each set."""

    x: Tensor
    d_y: Tensor


@dataclass(frozen=True, eq=False)
class Setting:
    """What is measured of one number of tokens and one load; None = where the logits say.

    inputs   sets of them
    routing  of the load, the same in each set
    layer    ours
    others   its variants, by name
    apart    ours once more, for `take_apart`; each use takes a new one
    """

    inputs: Sequence[Inputs]
    load: Load | None
    routing: ep_moe.Routing | None
    layer: ep_moe.MoELayer
    others: Mapping[str, ep_moe.MoELayer]
    apart: Callable[[], ep_moe.MoELayer]


@dataclass(frozen=True)
class Bench:
    """One run: what was asked for, a layer with the weights, where it runs and where its numbers
    go."""

    config: LayerBench
    layer: ep_moe.MoELayer
    process: Process
    recorder: Recorder
    loads: Sequence[Load | None]

    @classmethod
    def start(cls, config: LayerBench, process: Process) -> "Bench":
        loads: list[Load | None] = []
        for skew in config.skews:
            loads.append(Skewed(config.moe, skew) if skew > 1 else None)
        if config.trace:
            step, number = config.trace_step, config.trace_layer
            replay = Replay.load(config.trace, config.moe, step=step, layer=number)
            most = min(config.tokens) if loads else max(config.tokens)
            replay.share(most, process)  # too many: refused before anything is timed
            loads.append(replay)
        torch.manual_seed(config.seed)  # the same on every rank, and with it the router's weights
        moe = bounded(config.moe, max(config.tokens))
        with process.device:
            layer = ep_moe.MoELayer(moe, ep=process.group).to(config.torch_dtype)
        for variant in variants_of(config.moe, config.variants).values():  # one that cannot be made
            layer_of(variant, layer, tokens=max(config.tokens), process=process, routing=None)
        recorder = Recorder.start(config.results, process, packages=PACKAGES)
        return cls(config, layer, process, recorder, loads or [None])

    @property
    def methods(self) -> Sequence[Method]:
        return self.config.methods or harness.methods_for(self.process.device)[:1]

    def run(self) -> None:
        if self.process.group is not None and self.config.peers:
            ranks = self.process.world_size
            say(f"skipped the peers: they run on one rank, and there are {ranks}", self.process)
        if self.process.group is None and self.config.alone:
            say("skipped the parts alone: on one rank nothing travels", self.process)
        self.measure_ceilings()
        for tokens in self.config.tokens:
            inputs = self.make_inputs(tokens)
            for load in self.loads:
                try:
                    routing = None if load is None else load.share(tokens, self.process)
                except ep_moe.ConfigError as reason:
                    say(f"skipped the trace: {reason}", self.process)
                    continue
                setting = self.set_up(inputs, load, routing)
                for direction in self.config.directions:
                    self.time_layer(setting, direction)
                    if self.process.group is None:
                        self.time_beside_peers(setting, direction)

    def measure_ceilings(self) -> None:
        """Once per window; recorded for each method, since they bound them all."""
        for window in self.config.windows:
            found = harness.ceilings(self.config.torch_dtype, window, process=self.process)
            for method in self.methods:
                case = {"dtype": self.config.dtype, "method": method, **asdict(window)}
                self.recorder.add("layer", CEILING, case, found)

    def make_inputs(self, tokens: int) -> list[Inputs]:
        """As many sets as it takes for a call not to find its inputs in the cache."""
        moe, device, dtype = self.config.moe, self.process.device, self.config.torch_dtype
        touched = min(1.0, tokens * moe.top_k / moe.num_experts)  # share of the experts, at most
        weights = touched * sum(weight.nbytes for weight in self.layer.experts.parameters())
        rows = 2 * tokens * moe.hidden_size * dtype.itemsize
        generator = torch.Generator(device).manual_seed(self.config.seed + self.process.rank)
        sets = []
        for _ in range(harness.input_sets(int(weights + rows), device)):
            both = torch.randn(2, tokens, moe.hidden_size, generator=generator, device=device)
            x, d_y = both.to(dtype)
            sets.append(Inputs(x.requires_grad_(), d_y))
        return sets

    def set_up(
        self, inputs: Sequence[Inputs], load: Load | None, routing: ep_moe.Routing | None
    ) -> Setting:
        """routing: this rank's share of the load."""
        moe, tokens = self.config.moe, len(inputs[0].x)

        def build(moe: ep_moe.MoEConfig) -> ep_moe.MoELayer:
            return layer_of(moe, self.layer, tokens=tokens, process=self.process, routing=routing)

        variants = variants_of(moe, self.config.variants)
        others = {name: build(variant) for name, variant in variants.items()}
        whole = replace(moe, shared_expert_overlap=False, pipeline_chunks=1)  # nothing beside
        return Setting(inputs, load, routing, build(moe), others, partial(build, whole))

    def time_layer(self, setting: Setting, direction: Direction) -> None:
        """x to y, beside its variants and its parts, and the breakdown of one input set into
        stages."""

        def calls(layer: ep_moe.MoELayer) -> list[Callable[[], Outputs]]:
            leaves, made = list(layer.parameters()), []
            for x, d_y in setting.inputs:
                made.append(_call(direction, partial(_forward, layer, x), (x, *leaves), d_y))
            return made

        def check(output: Outputs) -> None:
            _agree(output, ours[0](), direction, self.config.torch_dtype)

        ours = calls(setting.layer)
        implementations = {OURS: Implementation(ours, setting.layer.transport.caps.graphable)}
        for name, other in setting.others.items():
            graphable = other.transport.caps.graphable
            implementations[name] = Implementation(calls(other), graphable, check)
        if self.config.alone and self.process.group is not None:
            apart = setting.apart()
            implementations |= take_apart(apart, calls(apart)).implementations(check)

        def by_parts(name: str, times: Mapping[str, float]) -> Metrics:
            parts = [times[part] for part in (COMPUTE, COMMUNICATION) if part in times]
            if name in (COMPUTE, COMMUNICATION) or len(parts) < 2:
                return {}
            return {"ratio": (times[name] / max(parts), "ratio")}

        case = self.case("layer", direction, setting)
        self.record(case, implementations, by_parts)
        if count := self.config.profiled_calls:
            with profile_stages(self.process) as stages:
                for _ in range(count):
                    ours[0]()
            metrics = {name: (ms / count, "ms") for name, ms in stages.items()}
            self.recorder.add("layer_stages", OURS, {**case, "calls": count}, metrics)

    def time_beside_peers(self, setting: Setting, direction: Direction) -> None:
        """x, ids and gate weights to y: ours, each peer that agrees with it, the dense bound."""
        config, layer, inputs = self.config.moe, setting.layer, setting.inputs
        experts = layer.experts
        with torch.no_grad():
            routings = [setting.routing or layer.router(i.x, None)[0] for i in inputs]
        forwards: dict[str, Callable[[], Tensor]] = {}

        def calls(name: str, peer: Peer) -> list[Callable[[], Outputs]]:
            weights, made = peer.weights or (experts.w_gate_up, experts.w_down), []
            for i, routing in zip(inputs, routings, strict=True):
                ids = routing.ids.to(peer.ids_dtype)
                gates = routing.gate_weights.to(peer.gate_dtype, copy=True).requires_grad_()
                run = partial(peer.run, i.x, ids, gates)
                forwards.setdefault(name, run)
                made.append(_call(direction, run, (i.x, gates, *weights), i.d_y))
            return made

        def our_moe(x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
            return ep_moe.moe(x, ep_moe.Routing(ids, gates), experts, layer.transport)

        def check(peer: Peer, output: Outputs) -> None:
            if isinstance(output, tuple):
                d_x, d_gates, *d_weights = output
                output = (d_x, d_gates, *peer.ours(*d_weights))
            _agree(output, ours[0](), direction, self.config.torch_dtype)

        graphable = layer.transport.caps.graphable
        ours = calls(OURS, Peer(our_moe, torch.int32, torch.float32, graphable))
        implementations = {OURS: Implementation(ours, graphable)}
        for name in self.config.peers:
            try:
                peer = PEERS[name](config, experts)
            except Unavailable as reason:
                say(f"skipped {name}: {reason}", self.process)
                continue
            if direction == "forward+backward" and not peer.trains:
                say(f"skipped {name}: it has no backward", self.process)
                continue
            implementations[name] = Implementation(
                calls(name, peer), peer.graphable, partial(check, peer)
            )
        dense = [_dense_call(direction, i.x, config, experts) for i in inputs]
        implementations[f"{CEILING}: dense"] = Implementation(dense, graphable=True)
        touched = touched_bytes([routing.ids for routing in routings], experts)

        def of_experts(name: str, times: Mapping[str, float]) -> Metrics:
            if name not in forwards:  # the ceiling has no experts
                return {}
            if direction == "forward":
                return {"touched": (touched / times[name] / 1e9, "TB/s")}
            if self.process.device.type != "cuda":
                return {}
            return {"alive": (alive_bytes(forwards[name], inputs[0].x) / 1e9, "GB")}

        case = self.case("moe", direction, setting)
        self.record(case, implementations, of_experts)

    def case(self, scope: str, direction: Direction, setting: Setting) -> dict[str, Any]:
        """What is measured; of the layer's fields those that differ from their defaults."""
        moe, tokens, ranks = self.config.moe, len(setting.inputs[0].x), self.process.world_size
        chosen = {f.name: getattr(moe, f.name) for f in fields(moe)}
        return {
            "model": self.config.model,
            "scope": scope,
            "direction": direction,
            "ranks": ranks,
            "tokens": tokens,
            "dtype": self.config.dtype,
            **{f.name: chosen[f.name] for f in fields(moe) if chosen[f.name] != f.default},
            **(setting.load.case(tokens, ranks) if setting.load else {}),
        }

    def record(
        self,
        case: Mapping[str, Any],
        implementations: Mapping[str, Implementation],
        more: Callable[[str, Mapping[str, float]], Metrics],
    ) -> None:
        """Time them beside each other, and keep and print each window's results as they come;
        `more` has an implementation's other metrics, given the ms of all that it was beside."""
        all_tokens = case["tokens"] * case["ranks"]
        count = operations(self.config.moe, case["tokens"], case["scope"], case["direction"])
        results = harness.compare(
            implementations,
            methods=self.methods,
            windows=self.config.windows,
            process=self.process,
        )
        for (method, window), group in groupby(results, lambda r: (r.method, r.window)):
            timings = {result.name: result.timing for result in group}
            times = {name: timing.median_ms for name, timing in timings.items()}
            for name, timing in timings.items():
                ms, metrics = times[name], timing.metrics()
                if name != COMMUNICATION:
                    metrics["tokens/s"] = (all_tokens / ms * 1e3, "tokens/s")
                    metrics["TFLOP/s"] = (count / ms / 1e9, "TFLOP/s")
                metrics |= more(name, times)
                timed = {**case, "method": method, **asdict(window)}
                self.recorder.add("layer", name, timed, metrics)
                what = f"{case['scope']} {case['direction']}, {case['tokens']} tokens, {method}"
                what = f"{what}, {window.window_ms:g} ms windows: {name} {ms:.4g} ms"
                ratio = f", ratio {metrics['ratio'][0]:.3g}" if "ratio" in metrics else ""
                say(f"{what}{ratio}", self.process)


def operations(moe: ep_moe.MoEConfig, tokens: int, scope: str, direction: str) -> int:
    """Floating-point operations of T tokens: those of the matrix products, a multiply-add as 2."""
    count = 6 * moe.hidden_size * moe.intermediate_size * moe.top_k
    if scope == "layer":
        count += 6 * moe.hidden_size * moe.shared_size + 2 * moe.hidden_size * moe.num_experts
    return count * tokens * (3 if direction == "forward+backward" else 1)


def touched_bytes(ids: Sequence[Tensor], experts: ep_moe.Experts) -> float:
    """Bytes of the weights of the experts in `ids`, the mean over the input sets."""
    of_expert = experts.w_gate_up[0].nbytes + experts.w_down[0].nbytes
    return statistics.mean(len(one.unique()) for one in ids) * of_expert


def alive_bytes(forward: Callable[[], Tensor], x: Tensor) -> int:
    """CUDA memory that is alive between forward and backward: x, and all that the forward has
    allocated and not freed, but for y."""
    before = torch.cuda.memory_allocated(x.device)
    y = forward()
    return torch.cuda.memory_allocated(x.device) - before - y.nbytes + x.nbytes


def main(argv: Sequence[str] | None = None) -> None:
    config = parse_args(LayerBench, argv)
    process = ep_moe.init_process()
    try:
        try:
            bench = Bench.start(config, process)
        except (ep_moe.ConfigError, ep_moe.InputError) as error:
            raise SystemExit(f"bench_layer.py: {error}") from None
        bench.run()
        if bench.recorder.writes:
            for name in ("layer", "layer_stages"):
                if rows := latest_rows(bench.recorder.written(name)):
                    print(f"\n## {name}\n\n{report.table(rows)}")
                if parts := report.wide_table(rows):
                    print(f"\n## {name}, beside its parts\n\n{parts}")
    finally:
        process.close()


def _forward(layer: ep_moe.MoELayer, x: Tensor) -> Tensor:
    return layer(x)[0]


def _agree(output: Outputs, ours: Outputs, direction: Direction, dtype: torch.dtype) -> None:
    """Raises Disagreement."""
    error, limit = largest_error(output, ours), error_limit(dtype)
    if not error <= limit:  # NaN too
        raise Disagreement(f"its {direction} is {error:.1e} from ours, above {limit:g}")


def _call(
    direction: Direction,
    run: Callable[[], Outputs],
    leaves: Sequence[Tensor],
    d_out: Outputs,
) -> Callable[[], Outputs]:
    """One measured call: the outputs of `run` without autograd, or the gradients of `leaves`.

    The gradients are returned rather than added to .grad, which would be one more pass over them.
    """
    if direction == "forward":
        return torch.no_grad()(run)
    return lambda: torch.autograd.grad(run(), leaves, d_out)


def _dense_call(
    direction: Direction, x: Tensor, moe: ep_moe.MoEConfig, experts: ep_moe.Experts
) -> Callable[[], Outputs]:
    """The dense products of as many rows as x has choices."""
    rows = x.detach().repeat(moe.top_k, 1)
    hidden = torch.randn(len(rows), moe.intermediate_size, device=x.device).to(x.dtype)
    weights = (experts.w_gate_up[0].detach(), experts.w_down[0].detach())
    leaves = tuple(leaf.requires_grad_() for leaf in (rows, hidden, *weights))
    d_out = (torch.randn_like(hidden).repeat(1, 2), torch.randn_like(rows))
    return _call(direction, partial(dense_products, *leaves), leaves, d_out)


if __name__ == "__main__":
    main()
