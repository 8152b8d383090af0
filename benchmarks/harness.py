"""How time is measured here.

A GPU at its power limit runs a long burst slower than a short one (a bf16 product on one H200: 796
TFLOP/s over 8 ms, 671 over a second), so two times compare only if their windows and the rests
before them were equal. Every implementation gets the same windows, in turn, and each record states
them. The machine's own ceilings are measured by the same code in the same run.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from ep_moe.parallel import Process

Call = Callable[[], object]
Clock = Callable[[Call], float]  # runs the work, waits until it is done, says how many ms it took
Method = Literal["graph", "events", "wall"]
Metrics = dict[str, tuple[float, str]]  # name -> (value, unit)

# A graph holds calls for about this long: the few µs between replays are then below a percent.
_GRAPH_MS = 5.0
_COPY_BYTES = {"cuda": 2**31, "cpu": 2**28}  # far beyond any cache
_MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}


def wall_clock(work: Call) -> float:
    """ms on the host's clock, for work that is done when it returns."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def event_clock(work: Call) -> float:
    """ms between two events on the current CUDA stream; times when the device waits for the host
    count."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


@dataclass(frozen=True, kw_only=True)
class Window:
    """Each implementation gets `rounds` windows of about `window_ms` of back-to-back calls, each
    after `rest_ms` of idling."""

    window_ms: float
    rest_ms: float
    rounds: int


class Disagreement(RuntimeError):
    """An implementation computes something else; the message says by how much."""


@dataclass(frozen=True)
class Implementation:
    """calls: one per input set, each the same work on other data, returning what it computes.

    graphable  a call never waits for the device, so that a CUDA graph can hold it
    check      gets what the first call returned before anything else runs; raises Disagreement
    """

    calls: Sequence[Call]
    graphable: bool
    check: Callable[[Any], None] | None = None


@dataclass(frozen=True)
class Runner:
    """A warm implementation: a step makes `calls_per_step` calls on the next input sets.

    first_call_ms  the first call, with the compilation and library set-up that nothing before it
                   in the process has done
    call_ms        an estimate of a warm call
    calls          kept because a graph reads the memory of their inputs
    """

    steps: Sequence[Call]
    calls_per_step: int
    first_call_ms: float
    call_ms: float
    calls: Sequence[Call]


@dataclass(frozen=True)
class Timing:
    """ms per call, one sample a window: the slowest rank's window over its calls. calls: of all
    windows together."""

    samples_ms: tuple[float, ...]
    calls: int
    first_call_ms: float

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    def metrics(self) -> Metrics:
        """The median, its spread over the windows, the first call, the number of timed calls."""
        return {
            "time": (self.median_ms, "ms"),
            "time_min": (min(self.samples_ms), "ms"),
            "time_max": (max(self.samples_ms), "ms"),
            "first_call": (self.first_call_ms, "ms"),
            "calls": (self.calls, "calls"),
        }


class Result(NamedTuple):
    name: str
    method: Method
    window: Window
    timing: Timing


def compare(
    implementations: Mapping[str, Implementation],
    *,
    methods: Sequence[Method],
    windows: Sequence[Window],
    process: Process,
) -> Iterator[Result]:
    """Time implementations beside each other in every way and window; who cannot be is named.

    Raises ValueError for a method that this device does not have.
    """
    accepted = methods_for(process.device)
    if unknown := [method for method in methods if method not in accepted]:
        raise ValueError(f"methods holds {unknown}, but {process.device.type} has {accepted}")
    warm = {}
    for name, implementation in implementations.items():
        try:
            warm[name] = prepare(implementation, process=process)
        except Disagreement as reason:
            say(f"skipped {name}: {reason}", process)
    for method in methods:
        runners = warm
        if method == "graph":
            graphable = {name: r for name, r in warm.items() if implementations[name].graphable}
            for name in warm.keys() - graphable.keys():
                say(f"skipped {name} in a graph: it waits for the device", process)
            runners = {name: capture(r, process=process) for name, r in graphable.items()}
        for window in windows:
            for name, timing in measure(runners, window, process=process).items():
                yield Result(name, method, window, timing)


def prepare(
    implementation: Implementation, *, process: Process, clock: Clock | None = None
) -> Runner:
    """Take an implementation to its steady state: the first call, its check, and two passes over
    the input sets, of which the second is timed."""
    clock, calls = clock or _clock(process.device), implementation.calls
    outputs: list[object] = []
    first_call_ms = _time(lambda: outputs.append(calls[0]()), process, clock)
    if implementation.check is not None:
        _agree(partial(implementation.check, outputs[0]), process)
    outputs.clear()  # the gradients of a layer are large
    every_set = partial(_run, calls, 0, len(calls))
    every_set()
    return Runner(calls, 1, first_call_ms, _time(every_set, process, clock) / len(calls), calls)


def capture(runner: Runner, *, process: Process) -> Runner:
    """The same calls as CUDA graphs of consecutive calls that together meet every input set.

    They share one memory pool: replays never overlap and nothing reads their outputs.
    """
    calls, pool, stream = runner.calls, torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what a stream allocates once must not fall into the capture
        _run(calls, 0, len(calls))
    torch.cuda.current_stream().wait_stream(stream)

    def graph_of(first: int, count: int) -> Call:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            _run(calls, first, count)
        graph.replay()  # the first replay uploads the graph
        return graph.replay

    few = min(len(calls), 100)
    call_ms = _time(graph_of(0, few), process, event_clock) / few
    calls_per_graph = math.ceil(_GRAPH_MS / call_ms)
    replays = [graph_of(first, calls_per_graph) for first in range(0, len(calls), calls_per_graph)]
    every_graph = partial(_run, replays, 0, len(replays))
    call_ms = _time(every_graph, process, event_clock) / (len(replays) * calls_per_graph)
    return Runner(replays, calls_per_graph, runner.first_call_ms, call_ms, calls)


def measure(
    runners: Mapping[str, Runner], window: Window, *, process: Process, clock: Clock | None = None
) -> dict[str, Timing]:
    """Time warm implementations: one window each in the order A B C, then B C A, and so on.

    Ranks start a window together. Its number of calls follows from how long the last ones took; the
    input sets go on from where the last window ended.
    """
    clock = clock or _clock(process.device)
    call_ms = {name: runner.call_ms for name, runner in runners.items()}
    samples: dict[str, list[float]] = {name: [] for name in runners}
    done = dict.fromkeys(runners, 0)  # steps
    for turn in range(window.rounds):
        for name in rotated(list(runners), turn):
            steps, calls_per_step = runners[name].steps, runners[name].calls_per_step
            count = max(1, round(window.window_ms / (call_ms[name] * calls_per_step)))
            time.sleep(window.rest_ms / 1e3)
            if process.group is not None:
                dist.barrier(process.group)
            steps[done[name] % len(steps)]()  # untimed: a device that rested starts slowly
            work = partial(_run, steps, done[name] + 1, count)
            call_ms[name] = _time(work, process, clock) / (count * calls_per_step)
            samples[name].append(call_ms[name])
            done[name] += count
    return {
        name: Timing(tuple(samples[name]), done[name] * runner.calls_per_step, runner.first_call_ms)
        for name, runner in runners.items()
    }


def ceilings(dtype: torch.dtype, window: Window, *, process: Process) -> Metrics:
    """What this machine can do in such windows; of several ranks, what the slowest one does.

    copy    TB/s of a large copy on the device, bytes read plus bytes written
    matmul  TFLOP/s of a large dense square product in `dtype` (cuBLAS on an NVIDIA GPU), 2 n^3
            operations
    """
    device, kind = process.device, process.device.type
    source = torch.randn(_COPY_BYTES[kind] // 4, device=device)
    target = torch.empty_like(source)
    size = _MATMUL_SIZE[kind]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    bounds = {
        "copy": Implementation([lambda: target.copy_(source)], graphable=True),
        "matmul": Implementation([lambda: a @ b.t()], graphable=True),
    }
    amount = {"copy": (2 * source.nbytes, "TB/s"), "matmul": (2 * size**3, "TFLOP/s")}
    found: Metrics = {}
    method = methods_for(device)[0]
    for name, _, _, timing in compare(bounds, methods=[method], windows=[window], process=process):
        done, unit = amount[name]
        found[name] = (done / timing.median_ms / 1e9, unit)
        found[f"{name}_min"] = (done / max(timing.samples_ms) / 1e9, unit)
        found[f"{name}_max"] = (done / min(timing.samples_ms) / 1e9, unit)
    return found


def methods_for(device: torch.device) -> tuple[Method, ...]:
    """The ways to take time on this device, the one that any implementation can stand first."""
    return ("events", "graph") if device.type == "cuda" else ("wall",)


def input_sets(bytes_per_call: int, device: torch.device) -> int:
    """How many input sets to rotate through: at least 3, and on a GPU enough to exceed its L2 three
    times.

    bytes_per_call: what one call reads and writes at least, weights included.
    """
    if device.type != "cuda":
        return 3
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(3, math.ceil(3 * cache / bytes_per_call))


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """[a,b,c] -> [b,c,a] for turn 1: nobody always runs first, or in the same neighbour's heat."""
    shift = turn % max(len(names), 1)
    return [*names[shift:], *names[:shift]]


def slowest(values: Sequence[float], process: Process) -> list[float]:
    """The largest of each value over the ranks; every rank has to call it."""
    if process.group is None:
        return list(values)
    largest = torch.tensor(values, dtype=torch.float64, device=process.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=process.group)
    return largest.tolist()


def say(text: str, process: Process) -> None:
    """Print on rank 0."""
    if process.rank == 0:
        print(text, flush=True)


def _clock(device: torch.device) -> Clock:
    return event_clock if device.type == "cuda" else wall_clock


def _agree(check: Call, process: Process) -> None:
    """Raise Disagreement on every rank if one finds it: the others must not go on alone."""
    found = None
    try:
        check()
    except Disagreement as disagreement:
        found = disagreement
    if any(slowest([float(found is not None)], process)):
        raise found or Disagreement("another rank finds that it computes something else")


def _run(steps: Sequence[Call], first: int, count: int) -> None:
    for i in range(first, first + count):
        steps[i % len(steps)]()


def _time(work: Call, process: Process, clock: Clock) -> float:
    """ms of the slowest rank, so that all ranks agree on how many calls follow."""
    (ms,) = slowest([clock(work)], process)
    return max(ms, 1e-6)
