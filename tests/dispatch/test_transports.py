"""What every transport promises: one row per (token, rank), in order, and two adjoint moves."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe import ConfigError, ExpertParallel, Routing, make_transport
from ep_moe.dispatch import TRANSPORTS, collective
from ep_moe.dispatch.needs import V1_RANKS
from ep_moe.ops import send
from ep_moe.testing import assert_close, run_ranks
from tests.dispatch.fake_deepep import GENERATIONS, stand_in
from tests.dispatch.windows import ON_GPUS, needs_interpreter, share_files

E, K, H = 24, 3, 5
SHARES = {  # tokens of each rank
    "even": (6, 6, 6, 6, 6, 6, 6, 6),
    "uneven and odd": (7, 1, 3, 5, 9, 1, 2, 4),
    "some empty": (0, 9, 0, 2, 0, 0, 1, 0),
    "all empty": (0, 0, 0, 0, 0, 0, 0, 0),
}
MOST = 9  # tokens of a rank
CHOICES = ("random", "one expert takes all", "half the slots nowhere")


class Kind(NamedTuple):
    """A transport, and what it is asked for. generation: of the DeepEP that stands in."""

    name: str
    generation: str | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.generation or ''}".strip()

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of rows and of gates."""
        moved = TRANSPORTS[self.name].caps.dtypes
        return (torch.float64, torch.float64) if moved is None else (moved[0], torch.float32)


def values(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Whole numbers where the dtype is narrow: then sums of a few are exact."""
    if dtype is torch.float64:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randint(-9, 10, shape, generator=generator).to(dtype)


def share(kind: Kind, rank: int, tokens: int, choice: str) -> tuple[Tensor, Routing]:
    """x[t] = (rank, t, ...), so that a row says where it came from."""
    generator = torch.Generator().manual_seed(rank)
    rows, gates_dtype = kind.dtypes
    x = values((tokens, H), generator, rows)
    x[:, 0], x[:, 1] = rank, torch.arange(tokens)
    ids = torch.rand(tokens, E, generator=generator).argsort(1)[:, :K].int()
    if choice == "one expert takes all":
        ids = torch.full((tokens, K), -1, dtype=torch.int32)
        ids[:, 0] = E - 1
    elif choice == "half the slots nowhere":
        ids[torch.rand(tokens, K, generator=generator) < 0.5] = -1
    gates = torch.rand(tokens, K, generator=generator, dtype=gates_dtype)
    return x, Routing(ids, gates)


def rank_moves(rank, kind, world_size, folder, device="cpu"):
    """Every cell in one go: starting ranks costs more than the moves."""
    if device == "cpu":
        share_files(folder, programs=6 if world_size == 2 else 2)
        stand_in(kind.generation)
    else:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    cells = [(shares, choice) for shares in SHARES for choice in CHOICES]
    return {c: moves(rank, kind, SHARES[c[0]][:world_size], c[1], device) for c in cells}


def moves(rank, kind, tokens, choice, device):
    ep = ExpertParallel.resolve(dist.group.WORLD)
    transport = make_transport(kind.name, ep, max_tokens_per_rank=MOST)
    x, routing = share(kind, rank, tokens[rank], choice)
    x, routing = x.to(device), Routing(routing.ids.to(device), routing.gate_weights.to(device))
    plan, rows, gates = transport.dispatch(x, routing, E)
    generator = torch.Generator().manual_seed(50 + rank)
    back_rows = values(rows.shape, generator, rows.dtype).to(device)
    back_gates = values(gates.shape, generator, gates.dtype).to(device)
    back_gates = back_gates.masked_fill(plan.local_ids < 0, 0.0)
    found = {
        "rows": rows,
        "gates": gates,
        "local_ids": plan.local_ids,
        "replayed": transport.replay(plan, x),
        "replayed, unkept": transport.replay(plan, x, keep=False).clone(),
        "back_rows": back_rows,
        "combined": transport.combine(plan, back_rows),
        "back_gates": back_gates,
        "replayed_gates": transport.replay_gates(plan, routing.gate_weights),
        "combined_gates": transport.combine_gates(plan, back_gates),
    }
    unkept = transport.dispatch(x, routing, E, keep=False)
    found["unkept"] = found["unkept, replayed"] = unkept.rows.clone()
    plans = [plan]
    if transport.caps.unordered:  # then that plan has an order of its own
        found["unkept, replayed"] = transport.replay(unkept.plan, x, keep=False)
        plans.append(unkept.plan)
    repeats = all(torch.equal(transport.combine(plan, back_rows), found["combined"]) for _ in "123")
    there_and_back = transport.combine(plan, rows)
    for each in plans:
        moved = transport.combine(each, transport.replay(each, x, keep=False))
        repeats &= torch.equal(moved, there_and_back)
    on_cpu = {what: value.cpu().clone() for what, value in found.items()}
    return {**on_cpu, "max_packed": plan.max_packed, "repeats": repeats}


def expected_arrivals(kind, world_size, tokens, choice, rank):
    """Rows, local ids and gates that rank must see: a loop over all tokens of all ranks."""
    each = E // world_size
    rows, ids, gates = [], [], []
    for source in range(world_size):
        x, routing = share(kind, source, tokens[source], choice)
        for t in range(len(x)):
            local = [i - rank * each for i in routing.ids[t].tolist()]
            local = [i if 0 <= i < each else -1 for i in local]
            if max(local) >= 0 or kind.name == "local":  # on one rank the arrived rows ARE x
                rows.append(x[t])
                ids.append(local)
                gates.append(routing.gate_weights[t])
    if not rows:
        return torch.zeros(0, H), torch.zeros(0, K, dtype=torch.int32), torch.zeros(0, K)
    return torch.stack(rows), torch.tensor(ids, dtype=torch.int32), torch.stack(gates)


KINDS = [Kind(name) for name in TRANSPORTS if name != "deepep"]
KINDS += [Kind("deepep", generation) for generation in GENERATIONS]
SLOW = {("symm", 8), ("deepep", 8)}  # minutes, on the two cores of a CI machine
MARKS = {"symm": [needs_interpreter]} | {key: [pytest.mark.slow] for key in SLOW}


def run(kind: Kind, ranks: int):
    marks = MARKS.get(kind.name, []) + MARKS.get((kind.name, ranks), [])
    return pytest.param(kind, ranks, marks=marks, id=f"{kind}, {ranks}")


RUNS = [run(kind, ranks) for kind in KINDS for ranks in (1, 2, 3, 4, 8)]


@pytest.mark.parametrize("kind, world_size", RUNS)
def test_moves(kind, world_size, tmp_path):
    caps = TRANSPORTS[kind.name].caps
    if not caps.backward or caps.weighs:
        pytest.skip(f"caps of {kind}: it has no backward, or weighs; it has a test file of its own")
    most = caps.max_ranks or world_size
    if world_size > most:
        pytest.skip(f"caps of {kind}: it serves {most} ranks at most, not {world_size}")
    if kind.generation == "v1" and world_size not in V1_RANKS:
        pytest.skip(f"{kind}: DeepEP v1 serves {V1_RANKS} ranks of a host, not {world_size}")
    check_cells(
        kind, run_ranks(rank_moves, world_size, kind, world_size, str(tmp_path), timeout=240.0)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("name", ON_GPUS)
def test_moves_on_gpus(name, world_size, require_gpu):
    how, kind = ON_GPUS[name], Kind(name)
    check_cells(kind, run_ranks(rank_moves, world_size, kind, world_size, None, "cuda", **how))


def check_cells(kind, ranks):
    for shares, choice in ranks[0]:
        tokens = SHARES[shares][: len(ranks)]
        check_moves(kind, tokens, choice, [got[shares, choice] for got in ranks])


def check_moves(kind, tokens, choice, ranks):
    for rank, got in enumerate(ranks):
        rows, local_ids, gates = expected_arrivals(kind, len(tokens), tokens, choice, rank)
        room = got["local_ids"].numel()
        somebodys = (got["local_ids"] >= 0).any(1)  # others are of buffers of a fixed size
        if kind.name == "local":
            somebodys[:] = True
        unkept = ("unkept", "unkept, replayed")
        out = ("rows", "replayed", "replayed, unkept", *unkept)
        for what in (*out, "gates", "replayed_gates", "local_ids", "back_rows", "back_gates"):
            got[what] = got[what][somebodys]
        if TRANSPORTS[kind.name].caps.unordered:
            order = by_token(got["unkept"])
            got |= {what: got[what][order] for what in unkept}
        assert torch.equal(got["local_ids"], local_ids)
        for what in out:
            assert_close(got[what], rows, name=f"rows ({what})", tolerance=0.0)
        here = local_ids >= 0
        assert int(here.sum()) <= got["max_packed"] <= room
        for what in ("gates", "replayed_gates"):
            assert_close(got[what][here], gates[here], name=what, tolerance=0.0)
            got[what] = got[what].masked_fill(~here, 0.0)
        assert got["repeats"] or not TRANSPORTS[kind.name].caps.deterministic
    # <dispatch(x), r> = <x, combine(r)>, summed over ranks: each is the other's transpose
    given = [share(kind, rank, count, choice) for rank, count in enumerate(tokens)]
    outward = sum(inner(got["rows"], got["back_rows"]) for got in ranks)
    inward = sum(inner(x, got["combined"]) for (x, _), got in zip(given, ranks, strict=True))
    assert_close(inward, outward, name="adjoint of the rows")
    outward = sum(inner(got["gates"], got["back_gates"]) for got in ranks)
    inward = sum(
        inner(routing.gate_weights.masked_fill(routing.ids < 0, 0.0), got["combined_gates"])
        for (_, routing), got in zip(given, ranks, strict=True)
    )
    assert_close(inward, outward, name="adjoint of the gates")


def inner(one: Tensor, other: Tensor) -> Tensor:
    return (one.double() * other.double()).sum()


def by_token(rows: Tensor) -> Tensor:
    """Their order by (source rank, source token), which they hold."""
    return (rows[:, 0].double() * MOST + rows[:, 1].double()).argsort()


def test_unknown_transport():
    with pytest.raises(
        ConfigError, match=r"transport = 'carrier pigeon'.*'?auto.*local.*collective"
    ):
        make_transport("carrier pigeon", ExpertParallel())


@pytest.mark.parametrize("name", TRANSPORTS)
def test_what_a_move_takes_is_said(name):
    """For experts that work beside one."""
    ep = SimpleNamespace(size=2, rank=0, group=object(), peers=SimpleNamespace(layers=count()))
    sms = TRANSPORTS[name](ep, 8).sms
    assert sms == {"local": 0, "deepep_low_latency": 0}.get(name, 16)


def test_local_serves_one_rank():
    with pytest.raises(ConfigError, match=r"transport = 'local'.*2 ranks"):
        make_transport("local", replace(ExpertParallel(), size=2))


def test_collective_needs_a_group():
    with pytest.raises(ConfigError, match=r"transport = 'collective'.* process group"):
        make_transport("collective", ExpertParallel())


def rank_of_small_group(rank):
    """A group of one rank among others talks to itself, not to the world."""
    alone = [dist.new_group([r]) for r in range(2)][rank]
    return moves_of(make_transport("collective", ExpertParallel.resolve(alone)), 5 + rank)


def moves_of(transport, tokens):
    x, routing = share(Kind("collective"), 0, tokens, "random")
    return len(transport.dispatch(x, routing, E).rows)


def test_group_of_one_in_a_larger_world():
    assert run_ranks(rank_of_small_group, 2) == [5, 6]


def rank_of_varying_sizes(rank, tokens):
    """Room and exchanges of blocks after each call, and whether what arrived is right."""
    collective.PATIENCE = 3
    transport = make_transport("collective", ExpertParallel.resolve(dist.group.WORLD))
    exchange, sizes, found = dist.all_to_all_single, [], []

    def counted(out, *args, **options):
        sizes.append(out.shape)
        return exchange(out, *args, **options)

    dist.all_to_all_single = counted
    for of_ranks in tokens:
        sizes.clear()
        x, routing = share(Kind("collective"), rank, of_ranks[rank], "random")
        plan, rows, gates = transport.dispatch(x, routing, E)
        expected = expected_arrivals(Kind("collective"), 2, of_ranks, "random", rank)
        for got, wanted in zip((rows, plan.local_ids, gates), expected, strict=True):
            assert torch.equal(got, wanted)
        found.append((len(sizes), sizes[-2][1] - 1, transport.room))
    return found


def test_blocks_have_room_for_what_the_busiest_rank_sends():
    """(exchanges, tokens that the last blocks have room for, those of the next): the first call
    learns it, a larger one too, and three much smaller ones in a row make the next blocks smaller.
    """
    tokens = [(3, 5), (8, 1), (2, 7), (9, 40), (15, 1), (33, 0), (20, 16)]
    expected = [(3, 8, 8), (2, 8, 8), (2, 8, 8), (3, 64, 64), *[(2, 64, 64)] * 3]
    tokens += [(15, 1), (3, 4), (4, 5), (0, 0)]
    expected += [(2, 64, 64), (2, 64, 64), (2, 64, 8), (2, 8, 8)]
    assert run_ranks(rank_of_varying_sizes, 2, tokens) == [expected, expected]


def rank_among_many(rank, tokens):
    send.FEW = 1  # as if there were many
    return rank_of_varying_sizes(rank, tokens)


def test_blocks_among_many_ranks_have_room_for_the_rows_of_a_pair():
    """All ranks see alike how large the largest is, though each sees its own alone."""
    first, second = run_ranks(rank_among_many, 2, [(3, 5), (8, 1), (9, 33), (0, 30), (30, 0)])
    assert first == second
    rooms = [room for _, _, room in first]
    assert rooms[1] <= 8
    assert rooms[2:] == [32, 32, 32]  # of 33 tokens some go to one of the two ranks alone
    assert [exchanges for exchanges, *_ in first[2:]] == [3, 2, 2]
