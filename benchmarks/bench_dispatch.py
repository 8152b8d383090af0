"""Rows to the ranks that need them, and back:

    torchrun --standalone --nproc-per-node 2 -m benchmarks.bench_dispatch
    python -m benchmarks.bench_dispatch --simulated_ranks 8

Under torchrun the scopes are `dispatch` (x, ids and gate weights to arrived rows, with all that it
takes: the order of sending, counts, waits), as for inference; `dispatch, kept`, whose rows outlive
the next move, as training needs, for transports where that is another thing; and `combine` (arrived
rows to the sums of tokens). Each transport stands beside a dispatcher that sends a row for every
choice (`all_to_all T*K`, as torchtitan does), and on GPUs of one host beside the link: a plain copy
of as many bytes to the peers, all at once (`ceiling: peer copy`). GB/s are of the bytes of rows
that leave for other ranks, each once for a rank that needs it, by the time of the whole operation.

With `--simulated_ranks W` one process times what it would do itself with W ranks: `pack` (the order
of sending with its messages, and the rows in one buffer) and `unpack` (the sum of what comes back),
each beside a copy of that buffer on the device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

import ep_moe
from benchmarks import harness, report
from benchmarks.harness import Disagreement, Implementation, Method, Window, say
from benchmarks.peers import error_limit, largest_error
from benchmarks.records import Recorder
from benchmarks.rows import CEILING, OURS, latest_rows
from benchmarks.trace import Replay
from ep_moe import ExpertParallel, MoEConfig, Routing, ops
from ep_moe.config import parse_args
from ep_moe.dispatch import TRANSPORTS, Transport, make_transport
from ep_moe.dispatch.deepep import DeepEPTransport
from ep_moe.dispatch.symm import SymmTransport
from ep_moe.errors import BackendUnavailable, ConfigError, InputError
from ep_moe.host import DEEPEP_DISTRIBUTIONS
from ep_moe.parallel import Process
from ep_moe.routing.forced import ForcedRouting

ALL_ROWS = "all_to_all T*K"


@dataclass(frozen=True, kw_only=True)
class DispatchBench:
    """Time the way of rows between ranks.

    Args:
        transports: those to time, beside a row for every choice
        hidden_size: numbers in a row (H)
        num_experts: experts of all ranks (E)
        top_k: choices of a token (K)
        tokens: tokens of each rank (T), one measurement each
        skew: load of the busiest expert over the mean; 1 = random
        trace: a recorded routing to replay instead, last step and first layer
        dtype: of rows
        sms: multiprocessors that symm and deepep take to move rows
        simulated_ranks: time packing and unpacking for so many ranks, in one process; 0 = do not
        methods: events and graph on a GPU (graph leaves out what cannot be captured), wall on a CPU
        windows_ms: lengths of the timed windows
        rest_ms: idle time before each window
        rounds: windows of each length for each implementation
        results: folder where the records are appended
        seed: of tokens and choices
    """

    transports: tuple[str, ...] = ("collective", "symm", "deepep")
    hidden_size: int = 7168
    num_experts: int = 256
    top_k: int = 8
    tokens: tuple[int, ...] = (128, 1024, 4096, 8192)
    skew: float = 1.0
    trace: str | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    sms: int = 16
    simulated_ranks: int = 0
    methods: tuple[Method, ...] = ()
    windows_ms: tuple[float, ...] = (40.0,)
    rest_ms: float = 100.0
    rounds: int = 5
    results: str = "benchmarks/results"
    seed: int = 0

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.transports) - set(TRANSPORTS)):
            raise ConfigError("transports", unknown, f"among {sorted(TRANSPORTS)}")
        if not 1 <= self.sms <= 128:
            raise ConfigError("sms", self.sms, "1 to 128")
        if self.skew < 1:
            raise ConfigError("skew", self.skew, "at least 1")

    @property
    def moe(self) -> MoEConfig:
        sizes = {name: getattr(self, name) for name in ("hidden_size", "num_experts", "top_k")}
        return MoEConfig(intermediate_size=1, **sizes)


class Inputs(NamedTuple):
    x: Tensor  # (T,H)
    routing: Routing


class Moves(NamedTuple):
    """out: to what arrived; kept: the same for training, maybe the same function; back: to (T,H)"""

    out: Callable[[Inputs], Any]
    kept: Callable[[Inputs], Any]
    back: Callable[[Any], Tensor]
    graphable: bool


@dataclass(frozen=True)
class Bench:
    """One run: what was asked for, where it runs, and where its numbers go."""

    config: DispatchBench
    process: Process
    recorder: Recorder
    replay: Replay | None

    def run(self) -> None:
        simulated, group = self.config.simulated_ranks, self.process.group
        if simulated and group is not None:
            raise ConfigError(
                "simulated_ranks", simulated, "0 under torchrun: ranks are real there"
            )
        if not simulated and group is None:
            raise ConfigError("simulated_ranks", simulated, "above 0, or start it by torchrun")
        for tokens in self.config.tokens:
            if simulated:
                self.time_packing(tokens, simulated)
            else:
                self.time_moves(tokens)

    def make_inputs(self, tokens: int) -> list[Inputs]:
        """As many sets as it takes for a call not to find its inputs in the cache."""
        config, device = self.config, self.process.device
        generator = torch.Generator(device).manual_seed(config.seed + self.process.rank)
        dtype = getattr(torch, config.dtype)
        make = partial(torch.randn, generator=generator, device=device)
        sets = []
        bytes_of_rows = 2 * tokens * config.hidden_size * dtype.itemsize
        for _ in range(harness.input_sets(max(bytes_of_rows, 1), device)):
            x = make(tokens, config.hidden_size).to(dtype)
            sets.append(Inputs(x, self.routing(make, tokens)))
        return sets

    def routing(self, make: Callable[..., Tensor], tokens: int) -> Routing:
        if self.replay is not None:
            return self.replay.share(tokens, self.process)
        config, device = self.config, self.process.device
        if config.skew > 1:
            moe = replace(config.moe, forced_routing="skewed", forced_skew=config.skew)
            ids = ForcedRouting(moe).ids(tokens, device)
        else:
            ids = make(tokens, config.num_experts).topk(config.top_k, dim=1).indices
        return Routing(ids.int(), torch.ones(ids.shape, device=device))

    def time_packing(self, tokens: int, ranks: int) -> None:
        """What one rank does itself, beside a copy of the packed buffer."""
        experts = self.config.num_experts
        sets = self.make_inputs(tokens)
        sets = [Inputs(x, sets[0].routing) for x, _ in sets]  # buffers of one size
        order = _send_order(sets[0].routing, experts, ranks)
        sent = int(order.offsets[-1])

        def pack(x: Tensor, routing: Routing) -> Tensor:
            order = _send_order(routing, experts, ranks)
            return ops.gather(x, order.token_of_sent, order.offsets)

        packed = [pack(*inputs)[:sent].clone() for inputs in sets]
        target = torch.empty_like(packed[0])
        copies = Implementation([partial(target.copy_, p) for p in packed], graphable=True)
        graphable = self.process.device.type == "cuda"
        for scope, calls in {
            "pack": [partial(pack, *inputs) for inputs in sets],
            "unpack": [partial(ops.weighted_sum, p, None, order.sent_of_token) for p in packed],
        }.items():
            implementations = {OURS: Implementation(calls, graphable), f"{CEILING}: copy": copies}
            case = {"scope": scope, "simulated_ranks": ranks, "tokens": tokens}
            self.record(case, implementations, 2 * target.nbytes)

    def time_moves(self, tokens: int) -> None:
        """Dispatch and combine of every transport, beside a row for every choice."""
        config, process = self.config, self.process
        ep = ExpertParallel.resolve(process.group)
        sets = self.make_inputs(tokens)
        moves: dict[str, Moves] = {}
        for name in config.transports:
            try:
                if not TRANSPORTS[name].caps.backward:
                    raise ConfigError("transports", name, "of moves that have an adjoint")
                transport = make_transport(name, ep, max_tokens_per_rank=tokens)
                if isinstance(transport, SymmTransport | DeepEPTransport):
                    transport.sms = config.sms
                moves[name] = _moves_of(transport, config.num_experts)
                moves[name].out(sets[0])
            except (BackendUnavailable, ConfigError, InputError) as reason:
                moves.pop(name, None)
                say(f"skipped {name}: {reason}", process)
        moves[ALL_ROWS] = _moves_of_all_rows(ep, config.num_experts, config.top_k)
        order = _send_order(sets[0].routing, config.num_experts, ep.size)
        elsewhere = order.offsets.diff().tolist()
        leaving = (sum(elsewhere) - elsewhere[ep.rank]) * sets[0].x[0].nbytes
        (leaving,) = harness.slowest([float(leaving)], process)

        def check(times: Tensor, summed: Tensor) -> None:
            error = largest_error((summed,), (sets[0].x * times,))
            if not error <= error_limit(summed.dtype):
                raise Disagreement(f"rows that went out and back are off by {error:.1e}")

        dispatches, kept, combines = {}, {}, {}
        for name, (out, out_kept, back, graphable) in moves.items():
            times = order.sent_of_token.ge(0).sum(1, keepdim=True)
            if name == ALL_ROWS:
                times = torch.full_like(times, config.top_k)
            arrived = [out_kept(inputs) for inputs in sets]
            right = partial(check, times)

            whole = partial(_compose, right, back)
            dispatches[name] = Implementation([partial(out, i) for i in sets], graphable, whole)
            if out_kept is not out:
                calls = [partial(out_kept, inputs) for inputs in sets]
                kept[name] = Implementation(calls, graphable, whole)
            combines[name] = Implementation([partial(back, a) for a in arrived], graphable, right)
        link = self.link(ep, int(leaving), len(sets))
        case = {"tokens": tokens, "ranks": ep.size}
        for scope, implementations in {
            "dispatch": dispatches | link,
            "dispatch, kept": kept,
            "combine": combines | link,
        }.items():
            self.record({"scope": scope, **case}, implementations, leaving)

    def link(self, ep: ExpertParallel, leaving: int, sets: int) -> dict[str, Implementation]:
        """So many bytes to the other ranks, the same to each, where they reach each other."""
        device, each = self.process.device, leaving // max(ep.size - 1, 1)
        if device.type != "cuda" or not each:
            return {}
        from torch.distributed import _symmetric_memory as symmetric

        try:
            memory = symmetric.empty(ep.size * each, dtype=torch.uint8, device=device)
            handle = symmetric.rendezvous(memory, cast(dist.ProcessGroup, ep.group))
        except RuntimeError as reason:
            say(f"skipped the link: {reason}", self.process)
            return {}
        others = [(ep.rank + step) % ep.size for step in range(1, ep.size)]
        targets = [handle.get_buffer(r, (each,), torch.uint8, ep.rank * each) for r in others]

        def copy(source: Tensor, _: Tensor) -> None:
            for target in targets:
                target.copy_(source)

        sources = [torch.zeros(each, dtype=torch.uint8, device=device) for _ in range(sets)]
        calls = [partial(copy, source, memory) for source in sources]  # peers write to it
        return {f"{CEILING}: peer copy": Implementation(calls, True)}

    def record(
        self, case: Mapping[str, Any], implementations: Mapping[str, Implementation], moved: float
    ) -> None:
        """Time them beside each other. moved: bytes that the rate is of."""
        config = self.config
        windows = [
            Window(window_ms=ms, rest_ms=config.rest_ms, rounds=config.rounds)
            for ms in config.windows_ms
        ]
        shape = ("hidden_size", "num_experts", "top_k", "skew", "dtype")
        case = {**case, **{name: getattr(config, name) for name in shape}}
        if self.replay is not None:
            case |= self.replay.case(case["tokens"], self.process.world_size)
        methods = config.methods or harness.methods_for(self.process.device)[:1]
        for name, method, window, timing in harness.compare(
            implementations, methods=methods, windows=windows, process=self.process
        ):
            metrics = timing.metrics()
            metrics["GB/s"] = (moved / timing.median_ms / 1e6, "GB/s")
            if name in (SymmTransport.name, DeepEPTransport.name):
                metrics["SMs"] = (config.sms, "SMs")
            self.recorder.add(
                "dispatch", name, {**case, "method": method, **asdict(window)}, metrics
            )
            what = f"{case['scope']}, {case['tokens']} tokens, {method}"
            say(f"{what}: {name} {timing.median_ms * 1e3:.4g} us", self.process)


def _compose(last: Callable[[Any], None], first: Callable[[Any], Any], value: Any) -> None:
    last(first(value))


def _send_order(routing: Routing, num_experts: int, ranks: int) -> ops.SendOrder:
    """With the messages that go ahead of the rows, as `collective` makes them."""
    (tokens, top_k), gates = routing.ids.shape, routing.gate_weights
    blocks = ops.empty_blocks(
        ranks, lines=tokens, top_k=top_k, gates=gates.dtype, device=gates.device
    )
    return ops.send_order(routing.ids, gates, num_experts, blocks)


def _moves_of(transport: Transport, num_experts: int) -> Moves:
    def out(inputs: Inputs, keep: bool) -> tuple[Any, Tensor]:
        sent = transport.dispatch(inputs.x, inputs.routing, num_experts, keep=keep)
        return sent.plan, sent.rows

    kept, caps = partial(out, keep=True), transport.caps
    return Moves(
        partial(out, keep=False) if caps.in_place or caps.unordered else kept,
        kept,
        lambda arrived: transport.combine(*arrived),
        caps.graphable,
    )


class AllRows(NamedTuple):
    """What a dispatcher without dedup has to remember."""

    order: Tensor  # (T K,): choices by expert
    sent: list[int]
    arriving: list[int]
    rows: Tensor


def _moves_of_all_rows(ep: ExpertParallel, num_experts: int, top_k: int) -> Moves:
    """A row for every choice, sorted by expert; sizes through the host."""

    def out(inputs: Inputs) -> AllRows:
        ids = inputs.routing.ids.flatten()
        order = ids.argsort(stable=True)
        sent = torch.bincount(ids // (num_experts // ep.size), minlength=ep.size)
        arriving = torch.empty_like(sent)
        dist.all_to_all_single(arriving, sent, group=ep.group)
        to_each, from_each = torch.stack([sent, arriving]).tolist()
        rows = _exchange(inputs.x[order // top_k], to_each, from_each, ep)
        return AllRows(order, to_each, from_each, rows)

    def back(arrived: AllRows) -> Tensor:
        returned = _exchange(arrived.rows, arrived.arriving, arrived.sent, ep)
        unsorted = torch.empty_like(returned)
        unsorted[arrived.order] = returned
        return unsorted.unflatten(0, (-1, top_k)).sum(1)

    return Moves(out, out, back, graphable=False)


def _exchange(rows: Tensor, sent: list[int], arriving: list[int], ep: ExpertParallel) -> Tensor:
    received = rows.new_empty(sum(arriving), rows.shape[1])
    dist.all_to_all_single(received, rows, arriving, sent, group=ep.group)
    return received


def main(argv: Sequence[str] | None = None) -> None:
    config = parse_args(DispatchBench, argv)
    process = ep_moe.init_process()
    try:
        recorder = Recorder.start(config.results, process, packages=DEEPEP_DISTRIBUTIONS)
        try:
            replay = None
            if config.trace:
                replay = Replay.load(config.trace, config.moe, step=None, layer=None)
            Bench(config, process, recorder, replay).run()
        except ConfigError as error:
            raise SystemExit(f"bench_dispatch.py: {error}") from None
        if recorder.writes:
            rows = latest_rows(recorder.written("dispatch"))
            print(f"\n## dispatch\n\n{report.table(rows)}")
    finally:
        process.close()


if __name__ == "__main__":
    main()
