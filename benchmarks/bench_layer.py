"""The whole layer, forward and forward+backward, on any number of ranks:

    python -m benchmarks.bench_layer --moe configs/qwen3_30b_a3b.yaml --tokens '[4096,16384]'
    torchrun --standalone --nproc-per-node 8 -m benchmarks.bench_layer --moe configs/olmoe.yaml
    python -m benchmarks.bench_layer --moe LAYER.yaml --trace benchmarks/traces/NAME.npz

Scope `layer` goes from x to y, with router and shared experts. Scope `moe`, on one rank, goes from
x, ids and gate weights to y, as do the peers beside it. `forward` runs without autograd;
`forward+backward` ends with the gradients of x, of the gate weights (scope moe) and of all weights.

With a trace, tokens go where those of a real training run went. Scope `moe` takes its ids and gate
weights; scope `layer` takes its ids and computes logits, gate weights and losses from x, which is
random, but does not sort the logits to choose.

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
from typing import Any, Literal, get_args

import torch
from torch import Tensor

import ep_moe
from benchmarks import harness, report
from benchmarks.harness import Disagreement, Implementation, Method, Metrics, Window, say
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
from benchmarks.trace import Replay, record_of
from ep_moe.config import parse_args
from ep_moe.measure import profile_stages
from ep_moe.parallel import Process

Direction = Literal["forward", "forward+backward"]
Outputs = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class LayerBench:
    """Time one MoE layer, with its peers beside it where there is one rank.

    Args:
        moe: the layer; its forced_routing and forced_skew choose how tokens spread
        model: what the tables call it
        trace: a recorded routing to replay (`python -m benchmarks.trace` shows what it holds)
        trace_step: one of the optimizer steps in it, by default the last
        trace_layer: one of the layers in it, by default the first
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

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def windows(self) -> list[Window]:
        return [
            Window(window_ms=ms, rest_ms=self.rest_ms, rounds=self.rounds) for ms in self.windows_ms
        ]


@dataclass(frozen=True, eq=False)
class Inputs:
    """One input set: x (T,H) and the gradient of y, other data on each rank and in each set; of a
    trace the same routing in each set, and a record of it."""

    x: Tensor
    d_y: Tensor
    routing: ep_moe.Routing | None = None
    record: ep_moe.RoutingRecord | None = None


@dataclass(frozen=True)
class Bench:
    """One run: what was asked for, the layer, where it runs and where its numbers go."""

    config: LayerBench
    layer: ep_moe.MoELayer
    process: Process
    recorder: Recorder
    replay: Replay | None

    @classmethod
    def start(cls, config: LayerBench, process: Process) -> "Bench":
        replay = None
        if config.trace:
            step, number = config.trace_step, config.trace_layer
            replay = Replay.load(config.trace, config.moe, step=step, layer=number)
            replay.share(max(config.tokens), process)  # too many: refused before anything is timed
        torch.manual_seed(config.seed)  # the same on every rank, and with it the router's weights
        with process.device:
            layer = ep_moe.MoELayer(config.moe, ep=process.group).to(config.torch_dtype)
        recorder = Recorder.start(config.results, process, packages=PACKAGES)
        return cls(config, layer, process, recorder, replay)

    @property
    def methods(self) -> Sequence[Method]:
        return self.config.methods or harness.methods_for(self.process.device)[:1]

    def run(self) -> None:
        if self.process.group is not None and self.config.peers:
            ranks = self.process.world_size
            say(f"skipped the peers: they run on one rank, and there are {ranks}", self.process)
        self.measure_ceilings()
        for tokens in self.config.tokens:
            inputs = self.make_inputs(tokens)
            for direction in self.config.directions:
                self.time_layer(inputs, direction)
                if self.process.group is None:
                    self.time_beside_peers(inputs, direction)

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
            inputs = Inputs(x.requires_grad_(), d_y)
            if self.replay is not None:
                routing = self.replay.share(tokens, self.process)
                inputs = replace(inputs, routing=routing, record=record_of(routing))
            sets.append(inputs)
        return sets

    def forward(self, inputs: Inputs) -> Tensor:
        """x to y."""
        if inputs.record is None:
            return self.layer(inputs.x)[0]
        with ep_moe.replay_routing(inputs.record):
            return self.layer(inputs.x)[0]

    def time_layer(self, inputs: Sequence[Inputs], direction: Direction) -> None:
        """x to y, and the breakdown of one input set into stages."""
        layer = self.layer
        leaves = list(layer.parameters())
        calls = [_call(direction, partial(self.forward, i), (i.x, *leaves), i.d_y) for i in inputs]
        case = self.case("layer", direction, len(inputs[0].x))
        self.record(case, {OURS: Implementation(calls, layer.transport.caps.graphable)})
        if count := self.config.profiled_calls:
            with profile_stages(self.process) as stages:
                for _ in range(count):
                    calls[0]()
            metrics = {name: (ms / count, "ms") for name, ms in stages.items()}
            self.recorder.add("layer_stages", OURS, {**case, "calls": count}, metrics)

    def time_beside_peers(self, inputs: Sequence[Inputs], direction: Direction) -> None:
        """x, ids and gate weights to y: ours, each peer that agrees with it, the dense bound."""
        config, layer, experts = self.config.moe, self.layer, self.layer.experts
        with torch.no_grad():
            routings = [i.routing or layer.router(i.x, None)[0] for i in inputs]
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
            error, limit = largest_error(output, ours[0]()), error_limit(self.config.torch_dtype)
            if not error <= limit:  # NaN too
                raise Disagreement(f"its {direction} is {error:.1e} from ours, above {limit:g}")

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

        def of_experts(name: str, ms: float) -> Metrics:
            if name not in forwards:  # the ceiling has no experts
                return {}
            if direction == "forward":
                return {"touched": (touched / ms / 1e9, "TB/s")}
            if self.process.device.type != "cuda":
                return {}
            return {"alive": (alive_bytes(forwards[name], inputs[0].x) / 1e9, "GB")}

        case = self.case("moe", direction, len(inputs[0].x))
        self.record(case, implementations, of_experts)

    def case(self, scope: str, direction: Direction, tokens: int) -> dict[str, Any]:
        """What is measured; of the layer's fields those that differ from their defaults."""
        moe = self.config.moe
        chosen = {f.name: getattr(moe, f.name) for f in fields(moe)}
        return {
            "model": self.config.model,
            "scope": scope,
            "direction": direction,
            "ranks": self.process.world_size,
            "tokens": tokens,
            "dtype": self.config.dtype,
            **{f.name: chosen[f.name] for f in fields(moe) if chosen[f.name] != f.default},
            **(self.replay.case(tokens, self.process.world_size) if self.replay else {}),
        }

    def record(
        self,
        case: Mapping[str, Any],
        implementations: Mapping[str, Implementation],
        more: Callable[[str, float], Metrics] = lambda name, ms: {},
    ) -> None:
        """Time them beside each other, and keep and print each result as it comes; `more` has an
        implementation's other metrics, given its ms."""
        all_tokens = case["tokens"] * case["ranks"]
        count = operations(self.config.moe, case["tokens"], case["scope"], case["direction"])
        for name, method, window, timing in harness.compare(
            implementations,
            methods=self.methods,
            windows=self.config.windows,
            process=self.process,
        ):
            ms = timing.median_ms
            metrics = timing.metrics()
            metrics["tokens/s"] = (all_tokens / ms * 1e3, "tokens/s")
            metrics["TFLOP/s"] = (count / ms / 1e9, "TFLOP/s")
            metrics |= more(name, ms)
            timed = {**case, "method": method, **asdict(window)}
            self.recorder.add("layer", name, timed, metrics)
            what = f"{case['scope']} {case['direction']}, {case['tokens']} tokens, {method}"
            say(f"{what}, {window.window_ms:g} ms windows: {name} {ms:.4g} ms", self.process)


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
                rows = latest_rows(bench.recorder.written(name))
                print(f"\n## {name}\n\n{report.table(rows)}")
    finally:
        process.close()


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
