from functools import partial

import pytest
import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.harness import Disagreement, Implementation, Window
from ep_moe.parallel import Process
from ep_moe.testing import run_ranks

ALONE = Process(0, 0, 1, torch.device("cpu"), None)


class FakeTime:
    """A clock that only moves when somebody sleeps."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def sleep(self, ms, label=None):
        self.now += ms
        self.log.append(label)

    def clock(self, work):
        before = self.now
        work()
        return self.now - before

    def prepare(self, calls, check=None):
        implementation = Implementation(calls, graphable=False, check=check)
        return harness.prepare(implementation, process=ALONE, clock=self.clock)

    def measure(self, runners, **window):
        window = Window(**{"rest_ms": 0, "rounds": 3, **window})
        return harness.measure(runners, window, process=ALONE, clock=self.clock)


def test_a_known_sleep_is_measured():
    time = FakeTime()
    runners = {ms: time.prepare([partial(time.sleep, ms)] * 3) for ms in (2, 5)}
    timings = time.measure(runners, window_ms=100)
    assert timings[2].samples_ms == (2, 2, 2)
    assert timings[5].samples_ms == (5, 5, 5)
    assert timings[2].calls == 3 * 50  # equal windows, not equal calls
    assert timings[5].calls == 3 * 20


def test_the_median_and_its_spread():
    timing = harness.Timing((3.0, 1.0, 2.0), calls=7, first_call_ms=50.0)
    assert timing.metrics() == {
        "time": (2.0, "ms"),
        "time_min": (1.0, "ms"),
        "time_max": (3.0, "ms"),
        "first_call": (50.0, "ms"),
        "calls": (7, "calls"),
    }


def test_compilation_is_kept_out_of_the_steady_state():
    time = FakeTime()
    durations = iter([1000.0])
    runner = time.prepare([lambda: time.sleep(next(durations, 4.0))] * 2)
    assert runner.first_call_ms == 1000
    assert runner.call_ms == 4
    assert time.measure({"jit": runner}, window_ms=40)["jit"].samples_ms == (4, 4, 4)


def test_order_and_input_sets_rotate():
    time = FakeTime()
    runners = {
        name: time.prepare([partial(time.sleep, 1, f"{name}{i}") for i in range(3)])
        for name in "AB"
    }
    time.log.clear()
    time.measure(runners, window_ms=2, rounds=2)
    # one untimed call before the two of each window; it meets the set that was last in the cache
    assert time.log == ["A0", "A1", "A2", "B0", "B1", "B2", "B2", "B0", "B1", "A2", "A0", "A1"]


def test_what_one_rank_finds_ends_it_on_all():
    assert run_ranks(_disagree_on_rank_1, 2) == ["another rank", "mine is off"]


def _disagree_on_rank_1(rank):
    def check(output):
        if rank == 1:
            raise Disagreement("mine is off")

    process = Process(rank, rank, 2, torch.device("cpu"), dist.group.WORLD)
    try:
        harness.prepare(Implementation([lambda: None], False, check), process=process)
    except Disagreement as disagreement:
        return str(disagreement)[:12].strip()


@pytest.mark.parametrize("turn, expected", [(0, "abc"), (1, "bca"), (2, "cab"), (3, "abc")])
def test_rotated(turn, expected):
    assert "".join(harness.rotated("abc", turn)) == expected


def test_windows_keep_their_length_when_a_device_slows_down():
    time, pace = FakeTime(), [1.0]
    runner = time.prepare([lambda: time.sleep(pace[0])])
    pace[0] = 10.0
    timing = time.measure({"throttled": runner}, window_ms=100)["throttled"]
    assert timing.samples_ms == (10, 10, 10)
    assert timing.calls == 100 + 10 + 10


def test_a_call_longer_than_the_window_is_still_timed_once():
    time = FakeTime()
    timing = time.measure({"slow": time.prepare([partial(time.sleep, 70)])}, window_ms=40)["slow"]
    assert (timing.median_ms, timing.calls) == (70, 3)


def test_a_method_of_another_device_is_refused():
    results = harness.compare({}, methods=["wall", "graph"], windows=[], process=ALONE)
    with pytest.raises(ValueError, match=r"methods holds \['graph'\], but cpu has .*wall"):
        next(results)


def test_who_disagrees_is_named_and_not_timed(capsys):
    def check(output):
        if output != "right":
            raise Disagreement(f"it says {output}")

    ran = []
    implementations = {
        answer: Implementation([lambda a=answer: ran.append(a) or a], False, check)
        for answer in ("right", "wrong")
    }
    window = Window(window_ms=0.1, rest_ms=0, rounds=1)
    results = harness.compare(implementations, methods=["wall"], windows=[window], process=ALONE)
    assert [result.name for result in results] == ["right"]
    assert capsys.readouterr().out == "skipped wrong: it says wrong\n"
    assert ran.count("wrong") == 1


def test_compare_yields_each_implementation_in_each_window():
    implementations = {name: Implementation([lambda: None], graphable=False) for name in "ab"}
    windows = [Window(window_ms=ms, rest_ms=0, rounds=1) for ms in (0.2, 0.1)]
    results = list(
        harness.compare(implementations, methods=["wall"], windows=windows, process=ALONE)
    )
    assert [(r.name, r.window.window_ms) for r in results] == [
        ("a", 0.2),
        ("b", 0.2),
        ("a", 0.1),
        ("b", 0.1),
    ]


def test_ceilings(monkeypatch):
    monkeypatch.setitem(harness._COPY_BYTES, "cpu", 2**16)
    monkeypatch.setitem(harness._MATMUL_SIZE, "cpu", 32)
    window = Window(window_ms=1, rest_ms=0, rounds=3)
    found = harness.ceilings(torch.float32, window, process=ALONE)
    assert found["copy"][1] == "TB/s"
    assert found["matmul"][1] == "TFLOP/s"
    for name in ("copy", "matmul"):
        assert 0 < found[f"{name}_min"][0] <= found[name][0] <= found[f"{name}_max"][0]


def test_the_slowest_rank_counts():
    assert run_ranks(_slowest_of_two, 2) == [[3.0, 5.0], [3.0, 5.0]]


def _slowest_of_two(rank):
    process = Process(rank, rank, 2, torch.device("cpu"), dist.group.WORLD)
    return harness.slowest([[3.0, 1.0], [2.0, 5.0]][rank], process)


def test_ranks_agree_on_calls_and_times():
    """Ranks at different speeds make equally many calls (a collective in them would hang) and
    record the slower one's times."""
    first, second = run_ranks(_measure_at_own_pace, 2)
    assert first == second == ((4.0, 4.0), 2 * 25)


def _measure_at_own_pace(rank):
    time = FakeTime()
    process = Process(rank, rank, 2, torch.device("cpu"), dist.group.WORLD)
    window = Window(window_ms=100, rest_ms=0, rounds=2)
    sleep = Implementation([partial(time.sleep, [1.0, 4.0][rank])], graphable=False)
    runner = harness.prepare(sleep, process=process, clock=time.clock)
    timing = harness.measure({"it": runner}, window, process=process, clock=time.clock)["it"]
    return timing.samples_ms, timing.calls


def warm(calls, method, process):
    runner = harness.prepare(Implementation(calls, graphable=True), process=process)
    return harness.capture(runner, process=process) if method == "graph" else runner


@pytest.mark.gpu
@pytest.mark.usefixtures("require_gpu")
@pytest.mark.parametrize("method", ["events", "graph"])
def test_on_a_gpu_every_timed_call_runs_on_its_inputs(method):
    process = Process(0, 0, 1, torch.device("cuda"), None)
    counters = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(3)]
    calls = [partial(counter.add_, 1) for counter in counters]
    runner = warm(calls, method, process)
    for counter in counters:
        counter.zero_()
    window = Window(window_ms=5, rest_ms=0, rounds=3)
    timing = harness.measure({"count": runner}, window, process=process)["count"]
    untimed = window.rounds * runner.calls_per_step
    assert sum(int(counter) for counter in counters) == timing.calls + untimed
    assert min(int(counter) for counter in counters) > 0
    assert timing.median_ms > 0


@pytest.mark.gpu
@pytest.mark.usefixtures("require_gpu")
@pytest.mark.parametrize("method", ["events", "graph"])
def test_on_a_gpu_the_wait_for_the_device_is_in_the_time(method):
    """Sixteen times the spinning takes longer than four times as long: launches alone would not."""
    process = Process(0, 0, 1, torch.device("cuda"), None)
    cycles = {"short": 10**6, "long": 16 * 10**6}
    runners = {
        name: warm([partial(torch.cuda._sleep, n)], method, process) for name, n in cycles.items()
    }
    window = Window(window_ms=20, rest_ms=0, rounds=3)
    timings = harness.measure(runners, window, process=process)
    assert timings["long"].median_ms > 4 * timings["short"].median_ms
