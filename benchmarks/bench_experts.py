"""Where the time of the experts goes: products and moves one by one, and what each fusion is worth.

    python -m benchmarks.bench_experts --moe configs/qwen3_30b_a3b.yaml --tokens '[16384]'

One rank, random nearly even groups. Scope `product` has the six products of forward and backward,
in TFLOP/s of 2 * rows * depth * columns; beside each the dense product of the same size (a bound)
and torch's grouped_mm, which lacks what ours fuses. Scope `move` has what is not a product, in TB/s
of the bytes that must be read and written once. Scope `forward` adds one thing after another to a
loop over experts: grouped products, the sum over a row's experts in one kernel, the activation in
the product, and rows gathered as they are read. All calls work on the same operands, so sizes that
fit in the cache of a GPU are measured in it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

import ep_moe
from benchmarks import harness, report
from benchmarks.harness import Disagreement, Implementation, Method, Window, say
from benchmarks.peers import error_limit, largest_error
from benchmarks.records import Recorder
from benchmarks.rows import CEILING, OURS, latest_rows
from ep_moe import ops, tune
from ep_moe.config import parse_args
from ep_moe.parallel import Process
from ep_moe.tune import Operands
from ep_moe.types import Packed

Scope = Literal["product", "move", "forward"]


@dataclass(frozen=True, kw_only=True)
class ExpertsBench:
    """Time the parts of the expert MLP.

    Args:
        moe: the layer
        model: what the tables call it
        tokens: tokens that arrive, one measurement each
        ranks: that share the experts; this is one of them
        scopes: product, move, forward
        dtype: of rows and weights
        methods: events and graph on a GPU, wall on a CPU; by default events or wall
        windows_ms: lengths of the timed windows; a GPU at its power limit is slower in long ones
        rest_ms: idle time before each window
        rounds: windows of each length for each implementation
        results: folder where the records are appended
    """

    moe: ep_moe.MoEConfig
    model: str = "custom"
    tokens: tuple[int, ...] = (4096,)
    ranks: int = 1
    scopes: tuple[Scope, ...] = get_args(Scope)
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    methods: tuple[Method, ...] = ()
    windows_ms: tuple[float, ...] = (40.0,)
    rest_ms: float = 100.0
    rounds: int = 3
    results: str = "benchmarks/results"


Run = Callable[[Operands], Any]


class Part(NamedTuple):
    """One step of the experts. work: operations or bytes; calls: ours and what stands beside it."""

    name: str
    work: int
    calls: dict[str, Run]


def products(o: Operands, config: ep_moe.MoEConfig) -> Iterator[Part]:
    """In the order of a training step."""
    activation, rows = config.activation, len(o.pre)
    pre_size, h, i = o.pre.shape[1], o.rows.shape[1], o.h.shape[1]

    def wgrad(o: Operands, d_y: Tensor, x: Tensor, gathered: Literal["d_y", "x"]) -> Tensor:
        index, offsets = o.packed.arrived_of_packed, o.packed.offsets
        return ops.grouped_gemm_wgrad(d_y, x, offsets, arrived_of_packed=index, gathered=gathered)

    def ends(o: Operands) -> Tensor:
        return o.packed.offsets[1:]

    yield _product(
        *("hidden", rows, h, pre_size),
        lambda o: ops.hidden(
            o.rows, o.w_gate_up, o.packed, None, gates=None, activation=activation, keep=True
        ),
        lambda o: F.grouped_mm(_packed_rows(o), o.w_gate_up.mT, offs=ends(o)),
    )
    yield _product(
        *("product", rows, i, h),
        lambda o: ops.grouped_gemm(o.h, o.w_down, o.packed.offsets),
        lambda o: F.grouped_mm(o.h, o.w_down.mT, offs=ends(o)),
    )
    yield _product(
        *("gradient", rows, h, i),
        lambda o: ops.hidden_backward(
            o.d_out, o.w_down, o.packed, o.pre, None, gates=o.gates, activation=activation
        ),
        lambda o: F.grouped_mm(_packed_rows(o), o.w_down, offs=ends(o)),
    )
    yield _product(
        *("dgrad", rows, pre_size, h),
        lambda o: ops.grouped_gemm_dgrad(o.pre, o.w_gate_up, o.packed.offsets),
        lambda o: F.grouped_mm(o.pre, o.w_gate_up, offs=ends(o)),
    )
    yield _product(
        *("wgrad of gate and up", pre_size, rows, h),
        lambda o: wgrad(o, o.pre, o.rows, "x"),
        lambda o: F.grouped_mm(o.pre.mT, _packed_rows(o), offs=ends(o)),
    )
    yield _product(
        *("wgrad of down", h, rows, i),
        lambda o: wgrad(o, o.d_out, o.h, "d_y"),
        lambda o: F.grouped_mm(_packed_rows(o).mT, o.h, offs=ends(o)),
    )


def moves(o: Operands, config: ep_moe.MoEConfig) -> Iterator[Part]:
    y = o.rows.new_empty(len(o.pre), o.rows.shape[1])
    ids, experts = torch.empty_like(o.packed.packed_of_arrived), len(o.w_down)
    index, slots = o.packed.packed_of_arrived, len(o.pre)
    torch.searchsorted(
        o.packed.offsets[1:].contiguous(), index.contiguous(), right=True, out_int32=True, out=ids
    )
    yield Part("pack", 4 * 4 * slots, {OURS: lambda o: ops.pack(ids, experts, slots)})
    weighted = y.nbytes + o.rows.nbytes + index.nbytes + o.gates.nbytes
    yield Part("weighted sum", weighted, {OURS: lambda o: ops.weighted_sum(y, o.gates, index)})
    plain: dict[str, Run] = {OURS: lambda o: ops.weighted_sum(y, None, index)}
    yield Part("sum", weighted - o.gates.nbytes, plain)
    yield Part("gather", o.rows.nbytes + y.nbytes, {OURS: _packed_rows})


def forwards(o: Operands, config: ep_moe.MoEConfig) -> Iterator[Part]:
    """One thing after another, each named by the last that was added."""
    name = config.activation
    function = ops.ACTIVATIONS[name].forward

    def loop(o: Operands) -> Tensor:
        h = ops.hidden_ref(
            o.rows, o.w_gate_up, o.packed, None, gates=None, activation=name, keep=False
        ).h
        y = ops.grouped_gemm_ref(h, o.w_down, o.packed.offsets)
        return ops.weighted_sum_ref(y, o.gates, o.packed.packed_of_arrived)

    def down(h: Tensor, o: Operands) -> Tensor:
        return ops.grouped_gemm(h, o.w_down, o.packed.offsets)

    def grouped(o: Operands) -> Tensor:
        return function(ops.grouped_gemm(_packed_rows(o), o.w_gate_up, o.packed.offsets))

    def fused(rows: Tensor, packed: Packed, o: Operands) -> Tensor:
        return ops.hidden(
            rows, o.w_gate_up, packed, None, gates=None, activation=name, keep=False
        ).h

    def summed(y: Tensor, o: Operands) -> Tensor:
        return ops.weighted_sum(y, o.gates, o.packed.packed_of_arrived)

    in_order = torch.arange(len(o.pre), dtype=torch.int32, device=o.pre.device)
    copied = Packed(in_order, o.packed.choice_of_packed, in_order[:, None], o.packed.offsets)
    yield Part(
        "forward",
        6 * len(o.pre) * o.rows.shape[1] * o.h.shape[1],
        {
            OURS: lambda o: summed(down(fused(o.rows, o.packed, o), o), o),
            "loop over experts": loop,
            "+ grouped products": lambda o: ops.weighted_sum_ref(
                down(grouped(o), o), o.gates, o.packed.packed_of_arrived
            ),
            "+ one sum": lambda o: summed(down(grouped(o), o), o),
            "+ fused activation": lambda o: summed(down(fused(_packed_rows(o), copied, o), o), o),
        },
    )


PARTS = {"product": products, "move": moves, "forward": forwards}


@dataclass(frozen=True)
class Bench:
    """One run: what was asked for, where it runs, and where its numbers go."""

    config: ExpertsBench
    process: Process
    recorder: Recorder

    def run(self) -> None:
        config, device = self.config, self.process.device
        dtype = getattr(torch, config.dtype)
        for tokens in config.tokens:
            torch.manual_seed(0)
            flow = tune.operands(config.moe, tokens, config.ranks, dtype, device)
            for scope in config.scopes:
                for part in PARTS[scope](flow, config.moe):
                    self.record(scope, part, flow, tokens)

    def record(self, scope: Scope, part: Part, flow: Operands, tokens: int) -> None:
        """Time the calls of a part beside each other."""
        config, process = self.config, self.process
        calls = {name: partial(call, flow) for name, call in part.calls.items()}

        def check(output: Tensor) -> None:
            error, limit = largest_error(output, calls[OURS]()), error_limit(flow.rows.dtype)
            if not error <= limit:
                raise Disagreement(f"its {part.name} is {error:.1e} from ours, above {limit:g}")

        implementations = {
            name: Implementation(
                [call],
                graphable=name != "loop over experts",
                check=check if scope == "forward" else None,
            )
            for name, call in calls.items()
        }
        windows = [
            Window(window_ms=ms, rest_ms=config.rest_ms, rounds=config.rounds)
            for ms in config.windows_ms
        ]
        case: dict[str, Any] = {
            **{"model": config.model, "scope": scope, "part": part.name, "tokens": tokens},
            **{"ranks": config.ranks, "dtype": config.dtype},
        }
        methods = config.methods or harness.methods_for(process.device)[:1]
        for name, method, window, timing in harness.compare(
            implementations, methods=methods, windows=windows, process=process
        ):
            metrics, ms = timing.metrics(), timing.median_ms
            rate = "TB/s" if scope == "move" else "TFLOP/s"
            metrics[rate] = (part.work / ms / 1e9, rate)
            timed = {**case, "method": method, **asdict(window)}
            self.recorder.add("experts", name, timed, metrics)
            say(f"{part.name}, {tokens} tokens, {method}: {name} {ms:.4g} ms", process)


def _product(
    name: str,
    rows: int,
    depth: int,
    columns: int,
    ours: Run,
    torchs: Run,
) -> Part:
    """(rows, depth) by (depth, columns), which is also the dense product beside it."""
    dense: list[Tensor] = []

    def product(o: Operands) -> Tensor:
        if not dense:
            for shape in ((rows, depth), (columns, depth)):
                dense.append(torch.randn(shape, device=o.pre.device).to(o.pre.dtype))
        return F.linear(*dense)

    calls = {OURS: ours, "torch grouped_mm": torchs, f"{CEILING}: dense": product}
    return Part(name, 2 * rows * depth * columns, calls)


def _packed_rows(o: Operands) -> Tensor:
    return ops.gather(o.rows, o.packed.arrived_of_packed, o.packed.offsets)


def main(argv: Sequence[str] | None = None) -> None:
    config = parse_args(ExpertsBench, argv)
    process = ep_moe.init_process()
    try:
        recorder = Recorder.start(config.results, process)
        Bench(config, process, recorder).run()
        print(f"\n## experts\n\n{report.table(latest_rows(recorder.written('experts')))}")
    finally:
        process.close()


if __name__ == "__main__":
    main()
