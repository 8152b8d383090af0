"""The router, from logits to where every slot goes, on one device:

    python -m benchmarks.bench_router
    python -m benchmarks.bench_router --variants '[plain]' --num_experts 128 --tokens '[4096]'

Scopes:
    select   logits (T,E) fp32 -> ids and gate weights
    losses   the same, with the sums that the balance losses need
    pack     logits -> ids, gate weights, offsets and the packed order
    backward select and its gradient; `backward, losses` with those of the losses
    logits   x (T,H) bf16 -> logits (T,E) fp32

Peers without a gradient (vLLM, FlagGems, SGLang) are in select and pack, each in the variants that
its kernels compute.

kernels: how many kernels, copies and fills one call runs on the GPU.

Times in a graph are device times. Eager ones below about 20 us per kernel are the host's.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

import ep_moe
from benchmarks import harness, report
from benchmarks.harness import Disagreement, Implementation, Method, Window, say
from benchmarks.peers import Unavailable, largest_error
from benchmarks.records import Recorder
from benchmarks.routing_peers import (
    FORWARD_ONLY,
    PACKAGES,
    PEERS,
    Select,
    loss_sums,
    sort_by_expert,
)
from ep_moe import SelectionConfig, ops
from ep_moe.config import parse_args
from ep_moe.kernels.pack import pack
from ep_moe.measure import kernels_of
from ep_moe.parallel import Process

Scope = Literal["select", "losses", "pack", "backward", "backward, losses", "logits"]
Call = Callable[[Tensor], tuple[Tensor, ...]]

VARIANTS = {
    "grouped": SelectionConfig(top_k=8, num_expert_group=8, topk_group=4),
    "deepseek_v3": SelectionConfig(
        top_k=8, num_expert_group=8, topk_group=4, scoring_func="sigmoid", group_score="top2_sum"
    ),
    "plain": SelectionConfig(top_k=8),
    "plain, not renormalised": SelectionConfig(top_k=8, renormalize=False),
}
BIASED = ("deepseek_v3",)  # these have a selection bias


@dataclass(frozen=True, kw_only=True)
class RouterBench:
    """Time the router, with its peers beside it.

    Args:
        variants: ways to select (grouped, deepseek_v3, plain, "plain, not renormalised")
        scopes: select, losses, pack, backward, "backward, losses", logits
        num_experts: experts to choose from (E)
        hidden_size: of the tokens of scope logits (H)
        tokens: tokens (T), one measurement each
        methods: graph, events; on a CPU wall
        windows_ms: lengths of the timed windows
        rest_ms: idle time before each window
        rounds: windows of each length for each implementation
        results: folder where the records are appended
        peers: those to run beside ours
        seed: of the logits
    """

    variants: tuple[str, ...] = tuple(VARIANTS)
    scopes: tuple[Scope, ...] = get_args(Scope)
    num_experts: int = 256
    hidden_size: int = 7168
    tokens: tuple[int, ...] = (83, 1024, 8192, 65536)
    methods: tuple[Method, ...] = ()
    windows_ms: tuple[float, ...] = (40.0,)
    rest_ms: float = 50.0
    rounds: int = 5
    results: str = "benchmarks/results"
    peers: tuple[str, ...] = tuple(PEERS)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in {"variants": VARIANTS, "peers": PEERS}.items():
            if unknown := sorted(set(getattr(self, name)) - set(known)):
                raise ep_moe.ConfigError(name, unknown, f"among {sorted(known)}")


@dataclass(frozen=True)
class Bench:
    """One run: what was asked for, where it runs, and where its numbers go."""

    config: RouterBench
    process: Process
    recorder: Recorder

    def run(self) -> None:
        for tokens in self.config.tokens:
            for scope in self.config.scopes:
                if scope == "logits":
                    self.time_logits(tokens)
                else:
                    for variant in self.config.variants:
                        self.time_selection(variant, scope, tokens)

    def time_selection(self, variant: str, scope: Scope, tokens: int) -> None:
        """Ours beside every peer, each on the same logits."""
        config, experts = VARIANTS[variant], self.config.num_experts
        make = partial(torch.randn, device=self.process.device)
        torch.manual_seed(self.config.seed)
        bias = make(experts) / 100 if variant in BIASED else None
        d_weights, d_p = make(tokens, config.top_k), make(1, experts)
        backward, losses = scope.startswith("backward"), scope.endswith("losses")

        def ours(logits: Tensor) -> tuple[Tensor, ...]:
            segments = 1 if losses else None
            found = ops.select(logits, config, expert_bias=bias, segments=segments)
            if backward:
                d_logits = ops.select_backward(
                    d_weights,
                    d_p if losses else None,
                    d_p.new_ones(1) if losses else None,
                    selected=found,
                    logits=logits,
                    num_experts=experts,
                    dtype=logits.dtype,
                    config=config,
                )
                return found.gate_weights, d_logits
            if found.p_sum is not None and found.z_sum is not None:
                return found.gate_weights, found.ids, found.p_sum[0], found.z_sum[0]
            if scope == "pack":
                return found.gate_weights, found.ids, *_packed(found.ids, experts)
            return found.gate_weights, found.ids

        def peer(select: Select, logits: Tensor) -> tuple[Tensor, ...]:
            leaf = logits.detach().requires_grad_(backward)
            weights, ids = select(leaf)
            sums = loss_sums(leaf, config) if losses else ()
            if backward:
                ones = (d_p[0], d_p.new_ones(())) if losses else ()
                (d_logits,) = torch.autograd.grad((weights, *sums), leaf, (d_weights, *ones))
                return weights.detach(), d_logits
            if scope == "pack":
                order, place, offsets = sort_by_expert(ids, experts)
                return weights, ids, order // config.top_k, place.view_as(ids), offsets
            return weights, ids, *sums

        calls: dict[str, Call] = {report.OURS: ours}
        for name in self.config.peers:
            try:
                if name in FORWARD_ONLY and (backward or losses):
                    raise Unavailable("it only selects: no gradient, and no sums for the losses")
                calls[name] = partial(peer, PEERS[name](config, bias))
            except Unavailable as reason:
                if tokens == self.config.tokens[0]:  # the others have the same reason
                    say(f"skipped {name} in {variant}, {scope}: {reason}", self.process)
        self.record({"variant": variant, "scope": scope, "tokens": tokens}, calls, (experts,))

    def time_logits(self, tokens: int) -> None:
        """The router's product: bf16 tokens and weights, fp32 logits."""
        experts, hidden = self.config.num_experts, self.config.hidden_size
        weight = torch.randn(experts, hidden, device=self.process.device).bfloat16() / hidden**0.5
        wide = weight.float()
        calls: dict[str, Call] = {
            report.OURS: lambda x: (ops.router_logits(x.bfloat16(), weight),),
            "fp32 product": lambda x: (x.float() @ wide.t(),),
            "bf16 product": lambda x: ((x.bfloat16() @ weight.t()).float(),),
        }
        case = {"variant": "", "scope": "logits", "tokens": tokens, "hidden_size": hidden}
        self.record(case, calls, (hidden,), dtype=torch.bfloat16)

    def record(
        self,
        case: dict[str, Any],
        calls: dict[str, Call],
        width: tuple[int, ...],
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Time the calls beside each other, each on the same input sets."""
        shape, process = (case["tokens"], *width), self.process
        generator = torch.Generator(process.device).manual_seed(self.config.seed)
        one = torch.empty(shape, dtype=dtype, device="meta").nbytes
        sets = [
            torch.randn(shape, generator=generator, device=process.device).to(dtype)
            for _ in range(min(harness.input_sets(one, process.device), 2500))
        ]
        case |= {"num_experts": self.config.num_experts}
        expected = cache(lambda: calls[report.OURS](sets[0]))  # after ours was timed from cold
        # Scores that two functions compute differ in the last bit, and with it a choice in 10^5.
        by_logit = set(VARIANTS) - set(BIASED)

        def check(name: str, outputs: tuple[Tensor, ...]) -> None:
            error = largest_error(outputs, expected())
            exact = case["variant"] in by_logit and name not in FORWARD_ONLY
            if not error <= (1e-5 if exact else 2e-2):
                raise Disagreement(f"its {case['scope']} is {error:.1e} from ours")

        implementations = {
            name: Implementation([partial(call, x) for x in sets], True, partial(check, name))
            for name, call in calls.items()
        }
        windows = [
            Window(window_ms=ms, rest_ms=self.config.rest_ms, rounds=self.config.rounds)
            for ms in self.config.windows_ms
        ]
        methods = self.config.methods or harness.methods_for(process.device)
        for name, method, window, timing in harness.compare(
            implementations, methods=methods, windows=windows, process=process
        ):
            timed = {**case, "method": method, **asdict(window)}
            metrics = timing.metrics()
            if process.device.type == "cuda":
                kernels = kernels_of(implementations[name].calls[0])
                metrics["kernels"] = (len(kernels), "kernels")
            self.recorder.add("router", name, timed, metrics)
            what = ", ".join(str(value) for value in case.values() if value)
            say(f"{what}, {method}: {name} {timing.median_ms * 1e3:.4g} us", process)


def _packed(ids: Tensor, experts: int) -> tuple[Tensor, ...]:
    """As `ops.pack` gives them, but for the host sync that finds how many there are."""
    if not ids.is_cuda:
        packed = ops.pack(ids, experts)
        return packed.arrived_of_packed, packed.packed_of_arrived, packed.offsets
    arrived, _, place, offsets = pack(ids, experts)
    return arrived, place, offsets


def main(argv: Sequence[str] | None = None) -> None:
    config = parse_args(RouterBench, argv)
    process = ep_moe.init_process()
    try:
        bench = Bench(config, process, Recorder.start(config.results, process, packages=PACKAGES))
        bench.run()
        rows = report.latest_rows(bench.recorder.written("router"))
        print(f"\n## router\n\n{report.table(rows)}")
    finally:
        process.close()


if __name__ == "__main__":
    main()
