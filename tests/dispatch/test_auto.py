"""`auto` measures what can run, and every rank takes the same. Times are made up here: which of two
is faster on the machine of a test says nothing."""

import json
import logging
import os
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ep_moe import (
    BackendUnavailable,
    ConfigError,
    ExpertParallel,
    MoELayer,
    Routing,
    make_transport,
)
from ep_moe.dispatch import auto, deepep_buffers
from ep_moe.dispatch.auto import AutoTransport
from ep_moe.dispatch.deepep import DeepEPTransport
from ep_moe.host import DeepEP
from ep_moe.testing import assert_close, run_ranks
from tests.dispatch.ep_cases import config
from tests.dispatch.fake_deepep import stand_in
from tests.dispatch.windows import needs_interpreter, share_files
from tests.hosts import h200s

MOST, E, K, H = 8, 8, 2, 16
FOUND = DeepEP("/opt/deep_ep", "v2.5")
LAST = {"collective": 9.0, "symm": 8.0, "deepep": 7.0}


def prepare(folder, *, deepep=FOUND, ranks=2):
    """In each rank: GPUs, as far as `auto` can see, and stand-ins for what needs them. Returns the
    lines that are logged."""
    host = replace(h200s(ranks), deepep=deepep)
    auto.Host = SimpleNamespace(look=lambda: host)
    share_files(folder)
    stand_in("v2.5")
    return logged()


def logged():
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("ep_moe")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    return lines


def take(times):
    """A turn runs, and is said to have taken so long. Returns the turns."""
    turn, turns = auto._turn, []

    def fixed(transport, *rest):
        turn(transport, *rest)
        turns.append(transport.name)
        return times[transport.name]

    auto._turn = fixed
    return turns


def inputs(rank, dtype=torch.bfloat16, hidden=H, tokens=5):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens + rank, hidden, generator=generator).to(dtype)
    ids = torch.rand(len(x), E, generator=generator).argsort(1)[:, :K].int()
    return x, Routing(ids, torch.rand(len(x), K, generator=generator))


def world():
    return ExpertParallel.resolve(dist.group.WORLD)


def choice(rank, **how):
    transport = AutoTransport(world(), MOST)
    transport.dispatch(*inputs(rank, **how), E)
    return transport.chosen.name


def chosen_by_the_slowest(rank, folder):
    lines = prepare(folder)
    # The mean says symm, which is slow on one rank.
    turns = take({"collective": 5.0, "symm": (0.5, 8.0)[rank], "deepep": (4.0, 4.5)[rank]})
    chosen = [choice(rank), choice(rank)]
    return chosen, len(turns), lines, sorted(world().peers.shared)


@needs_interpreter
def test_the_fastest_by_its_slowest_rank_is_taken_measured_once_and_said_once(tmp_path):
    ranks = run_ranks(chosen_by_the_slowest, 2, str(tmp_path), timeout=120.0)
    for rank, (chosen, turns, lines, shared) in enumerate(ranks):
        assert chosen == ["deepep", "deepep"]
        assert turns == 3 * (auto.WARM + auto.TURNS)
        said = [line for line in lines if line.startswith("transport auto")]
        assert len(said) == (rank == 0)
        assert shared == ["auto", "deepep, 16 sms"]  # nobody else's buffers are left
        for line in said:
            assert (
                "transport auto: deepep for gpu none, ranks 2, tokens 8, measured 8, hidden_size 16"
                in line
            )
            assert "of 5 tokens took collective 5 ms, deepep 4.5 ms, symm 8 ms" in line


def different_sizes(rank, folder):
    prepare(folder)
    times = {**LAST, "deepep": 1.0}
    take(times)
    first = choice(rank)
    times["collective"] = 0.5
    return first, choice(rank, hidden=2 * H), choice(rank, tokens=1), choice(rank)


@needs_interpreter
def test_other_sizes_are_measured_for_themselves(tmp_path):
    for found in run_ranks(different_sizes, 2, str(tmp_path), timeout=120.0):
        assert found == ("deepep", "collective", "collective", "deepep")


def missing_on_one_rank(rank, folder):
    lines = prepare(folder, deepep=FOUND if rank else None)
    take({**LAST, "deepep": 1.0})
    return choice(rank), lines


@needs_interpreter
def test_what_is_missing_on_one_rank_is_left_out_on_all(tmp_path):
    ranks = run_ranks(missing_on_one_rank, 2, str(tmp_path), timeout=120.0)
    assert [chosen for chosen, _ in ranks] == ["symm", "symm"]
    (said,) = ranks[0][1]
    assert "not deepep: DeepEP: missing (pip install ep-moe[deepep]" in said


def failing_trial(rank, folder):
    lines = prepare(folder)
    take({**LAST, "deepep": 1.0})
    if rank:

        def refuse(*_, **__):
            raise BackendUnavailable("the link is down")

        DeepEPTransport._agree = refuse  # before anything is exchanged
    else:
        DeepEPTransport._agree = lambda self: None
        DeepEPTransport._buffer = refuse_all
    return choice(rank), lines


def refuse_all(*_, **__):
    raise BackendUnavailable("no buffer")


@needs_interpreter
def test_one_that_fails_when_it_is_tried_is_left_out_with_its_reason(tmp_path):
    ranks = run_ranks(failing_trial, 2, str(tmp_path), timeout=120.0)
    assert [chosen for chosen, _ in ranks] == ["symm", "symm"]
    assert "not deepep: no buffer" in ranks[0][1][-1]


def without_a_choice(rank, folder):
    lines = prepare(folder, deepep=None)
    turns = take(LAST)
    auto.Host = SimpleNamespace(look=lambda: h200s(1))  # two ranks, one GPU
    return choice(rank), turns, lines


def test_nothing_is_measured_where_only_one_can_run(tmp_path):
    ranks = run_ranks(without_a_choice, 2, str(tmp_path))
    assert [(chosen, turns) for chosen, turns, _ in ranks] == [("collective", [])] * 2
    (said,) = ranks[0][2]
    assert "collective for" in said
    assert "the only one that can run here" in said
    assert "symm: GPUs: 1" in said


def wrong_dtype(rank, folder):
    lines = prepare(folder)
    take({**LAST, "deepep": 1.0})
    return choice(rank, dtype=torch.float32), lines


@needs_interpreter
def test_one_that_does_not_move_the_dtype_is_left_out(tmp_path):
    ranks = run_ranks(wrong_dtype, 2, str(tmp_path), timeout=120.0)
    assert [chosen for chosen, _ in ranks] == ["symm", "symm"]
    assert "deepep: does not move torch.float32" in ranks[0][1][0]


def many_choices(rank, folder):
    lines = prepare(folder)
    take({**LAST, "deepep": 1.0})
    x, _ = inputs(rank)
    ids = torch.arange(33, dtype=torch.int32).expand(len(x), 33)
    transport = AutoTransport(world(), MOST)
    transport.dispatch(x, Routing(ids, torch.ones(ids.shape)), 40)
    return transport.chosen.name, lines


@needs_interpreter
def test_one_that_does_not_take_so_many_choices_is_left_out(tmp_path):
    ranks = run_ranks(many_choices, 2, str(tmp_path), timeout=120.0)
    assert [chosen for chosen, _ in ranks] == ["symm", "symm"]
    assert "deepep: sends a token to 32 experts at most" in ranks[0][1][0]


def in_inference(rank, folder):
    prepare(folder)
    take({**LAST, "deepep": 1.0})
    found = []
    for keep in (False, True):
        transport = AutoTransport(world(), MOST)
        transport.dispatch(*inputs(rank), E, keep=keep)
        (pool,) = (p for name, p in world().peers.shared.items() if name.startswith("deepep"))
        found.append([buffer.ordered for buffer in pool.buffers])
    return found, len(world().peers.shared["auto"])


@needs_interpreter
def test_what_is_measured_keeps_rows_where_the_call_does(tmp_path):
    """DeepEP sorts rows that are kept, and would go on to, with the buffer that a trial left."""
    for found in run_ranks(in_inference, 2, str(tmp_path), timeout=120.0):
        assert found == ([[False], [False, True]], 2)


def other_sms(rank, folder):
    prepare(folder)
    take({**LAST, "deepep": 1.0})
    transport = AutoTransport(world(), MOST)
    found = [transport.sms]
    transport.sms = 4
    found.append(transport.sms)
    copy = deepcopy(transport)
    for one in (transport, copy):
        one.dispatch(*inputs(rank), E)
        assert one.sms == one.chosen.sms
    return *found, transport.chosen.sms, copy.chosen.sms


@needs_interpreter
def test_sms_are_those_of_whatever_is_chosen(tmp_path):
    assert run_ranks(other_sms, 2, str(tmp_path), timeout=120.0) == [(16, 4, 4, 4)] * 2


def broken_deepep(rank, folder, error):
    lines = prepare(folder)
    take({**LAST, "deepep": 1.0})

    def refuse(*_, **__):
        raise error("no NVLink here")

    deepep_buffers._Elastic.dispatch = refuse
    return choice(rank), lines


@needs_interpreter
@pytest.mark.parametrize("error", [AssertionError, RuntimeError, torch.OutOfMemoryError])
def test_one_that_breaks_when_it_is_tried_is_left_out(error, tmp_path):
    """DeepEP asserts, and compiles in its first call."""
    for chosen, lines in run_ranks(broken_deepep, 2, str(tmp_path), error, timeout=120.0):
        assert chosen == "symm"
        assert "transport auto: deepep failed when it was tried: no NVLink here" in lines


def unlike_sizes(rank, folder):
    prepare(folder)
    take({**LAST, "collective": 1.0})
    choice(rank)  # known on rank 0 for what follows, not on rank 1
    with pytest.raises(ConfigError, match=r"max_tokens_per_rank = \[8, 9\].*same on every rank"):
        AutoTransport(world(), MOST + rank).dispatch(*inputs(rank), E)
    with pytest.raises(ConfigError, match=r"hidden_size = \[16, 17\]"):
        choice(rank, hidden=H + rank)


@needs_interpreter
def test_ranks_of_other_sizes_are_told(tmp_path):
    """One of them might have found its choice before, and the other would wait for it."""
    run_ranks(unlike_sizes, 2, str(tmp_path), timeout=20.0)


def kept_in_a_file(rank, folder):
    prepare(folder)
    path = f"{folder}/transports.json"
    os.environ[auto.FILE] = path
    times = {**LAST, "symm": 1.0}
    turns = take(times)
    found = [choice(rank)]
    dist.barrier()
    written = json.loads(Path(path).read_text())

    def start_again():
        world().peers.shared.pop("auto")
        turns.clear()

    times |= {"symm": 9.5}
    start_again()
    found.append(choice(rank))  # as the file says
    measured = [len(turns)]
    if rank:
        os.environ[auto.FILE] = f"{folder}/not there"
    start_again()
    found.append(choice(rank))  # the ranks disagree
    measured.append(len(turns))
    os.environ[auto.FILE] = path
    dist.barrier()
    if rank == 0:
        of_another = {key: {"transport": "carrier pigeon"} for key in written}
        Path(path).write_text(json.dumps(of_another))
    dist.barrier()
    start_again()
    found.append(choice(rank))
    measured.append(len(turns))
    return found, measured, written


@needs_interpreter
def test_a_file_keeps_what_was_found(tmp_path):
    for found, measured, written in run_ranks(kept_in_a_file, 2, str(tmp_path), timeout=120.0):
        assert found == ["symm", "symm", "deepep", "deepep"]
        assert measured[0] == 0
        assert measured[1] == measured[2] == 3 * (auto.WARM + auto.TURNS)
        ((key, entry),) = written.items()
        assert (
            "ranks 2, tokens 8, measured 8, hidden_size 16, num_experts 8, top_k 2, dtype bfloat16"
            in key
        )
        assert entry == {"transport": "symm", "ms": {**LAST, "symm": 1.0}}


def bad_files(rank, folder):
    lines = prepare(folder)
    take({**LAST, "symm": 1.0})
    for number, text in enumerate(("{", "[]", '{"a": 1}')):
        path = Path(folder, f"{number}.{rank}.json")
        path.write_text(text)
        os.environ[auto.FILE] = str(path)
        with pytest.raises(ConfigError, match=rf"EP_MOE_TRANSPORTS={path} = .*auto wrote"):
            choice(rank)
    os.environ[auto.FILE] = f"{folder}/nowhere/transports.json"
    return choice(rank), lines


@needs_interpreter
def test_a_file_that_cannot_be_used(tmp_path):
    ranks = run_ranks(bad_files, 2, str(tmp_path), timeout=120.0)
    for rank, (chosen, lines) in enumerate(ranks):
        assert chosen == "symm"
        assert any("nowhere/transports.json keeps nothing" in line for line in lines) == (rank == 0)


def whole_layer(rank, folder):
    prepare(folder)
    take({**LAST, "symm": 1.0})
    found = []
    for automatic in (False, True):
        torch.manual_seed(3)
        layer = MoELayer(config(num_shared_experts=1), dist.group.WORLD).double()
        if automatic:
            layer.transport = AutoTransport(layer.ep, MOST)
            layer = deepcopy(layer)
        x = torch.randn(6 - rank, H, dtype=torch.float64, requires_grad=True)
        y, _ = layer(x)
        grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()], allow_unused=True)
        found.append([y.detach(), *grads])
    own_number = layer.transport.chosen.layer == layer.transport.layer  # not that of a trial
    return found, layer.transport.chosen.name, layer.transport.caps.in_place, own_number


@needs_interpreter
def test_a_layer_trains_with_what_was_chosen(tmp_path):
    ranks = run_ranks(whole_layer, 2, str(tmp_path), timeout=120.0)
    for (expected, got), chosen, in_place, own_number in ranks:
        assert (chosen, in_place, own_number) == ("symm", True, True)
        for number, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_close(one, other, name=f"result {number}")


def while_capturing(rank):
    auto.capturing = lambda: True
    with pytest.raises(BackendUnavailable, match=r"first call.*layer\.warmup"):
        choice(rank)
    return AutoTransport(world(), MOST).caps.graphable


def test_a_graph_cannot_hold_the_choice():
    assert run_ranks(while_capturing, 2) == [True, True]


def what_is_made(rank):
    ep = world()
    bounded = make_transport("auto", ep, max_tokens_per_rank=MOST).name
    if not torch.cuda.is_available():
        torch.cuda.is_available = lambda: True
    return (
        bounded,
        make_transport("auto", ep).name,
        make_transport("auto", ep, max_tokens_per_rank=MOST).name,
        make_transport("auto", ExpertParallel(), max_tokens_per_rank=MOST).name,
    )


@needs_interpreter
def test_auto_measures_only_where_there_is_a_choice():
    expected = ("collective", "collective", "auto", "local")
    assert run_ranks(what_is_made, 2) == [expected, expected]


def on_gpus(rank):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    lines, found = logged(), []
    for transport in ("collective", "auto"):
        torch.manual_seed(0)
        moe = config(hidden_size=256, transport=transport, max_tokens_per_rank=40)
        layer = MoELayer(moe, dist.group.WORLD).cuda().bfloat16()
        x = torch.randn(33 + rank, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y, _ = layer(x)
        y.square().sum().backward()
        found.append([y.detach().cpu(), x.grad.cpu(), layer.experts.w_down.grad.cpu()])
    return found, layer.transport.chosen.name, lines


@pytest.mark.gpu
def test_auto_on_gpus(require_gpu):
    """Where ranks share a GPU the times mean nothing; the choice is one all the same. DeepEP takes
    part where it is installed."""
    switches = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    if auto.Host.look().deepep is not None:
        switches["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    ranks = run_ranks(on_gpus, 2, backend="nccl", timeout=160.0, environ=switches)
    (said,) = [line for line in ranks[0][2] if line.startswith("transport auto")]
    print(said)
    assert ranks[0][1] == ranks[1][1]
    assert "symm " in said
    assert "collective " in said
    for (expected, got), _, _ in ranks:
        for what, one, other in zip(("y", "dx", "dw"), got, expected, strict=True):
            assert_close(one, other, name=what)
