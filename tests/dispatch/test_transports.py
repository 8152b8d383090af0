"""What every transport promises: one row per (token, rank), in order, and two adjoint moves."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe import ConfigError, ExpertParallel, Routing, make_transport
from ep_moe.dispatch import TRANSPORTS
from ep_moe.testing import assert_close, run_ranks
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


def share(rank: int, tokens: int, choice: str) -> tuple[Tensor, Routing]:
    """x[t] = (rank, t, ...), so that a row says where it came from."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, H, generator=generator, dtype=torch.float64)
    x[:, 0], x[:, 1] = rank, torch.arange(tokens)
    ids = torch.rand(tokens, E, generator=generator).argsort(1)[:, :K].int()
    if choice == "one expert takes all":
        ids = torch.full((tokens, K), -1, dtype=torch.int32)
        ids[:, 0] = E - 1
    elif choice == "half the slots nowhere":
        ids[torch.rand(tokens, K, generator=generator) < 0.5] = -1
    gates = torch.rand(tokens, K, generator=generator, dtype=torch.float64)
    return x, Routing(ids, gates)


def rank_moves(rank, name, world_size, folder, device="cpu"):
    """Every cell in one go: starting ranks costs more than the moves."""
    if device == "cpu":
        share_files(folder, programs=6 if world_size == 2 else 2)
    else:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    cells = [(shares, choice) for shares in SHARES for choice in CHOICES]
    return {c: moves(rank, name, SHARES[c[0]][:world_size], c[1], device) for c in cells}


def moves(rank, name, tokens, choice, device):
    ep = ExpertParallel.resolve(dist.group.WORLD)
    transport = make_transport(name, ep, max_tokens_per_rank=MOST)
    x, routing = share(rank, tokens[rank], choice)
    x, routing = x.to(device), Routing(routing.ids.to(device), routing.gate_weights.to(device))
    plan, rows, gates = transport.dispatch(x, routing, E)
    generator = torch.Generator().manual_seed(50 + rank)
    back_rows = torch.randn(rows.shape, generator=generator, dtype=rows.dtype).to(device)
    back_gates = torch.randn(gates.shape, generator=generator, dtype=gates.dtype).to(device)
    back_gates = back_gates.masked_fill(plan.local_ids < 0, 0.0)
    found = {
        "rows": rows,
        "gates": gates,
        "local_ids": plan.local_ids,
        "replayed": transport.replay(plan, x),
        "unkept": transport.dispatch(x, routing, E, keep=False).rows.clone(),
        "replayed, unkept": transport.replay(plan, x, keep=False).clone(),
        "back_rows": back_rows,
        "combined": transport.combine(plan, back_rows),
        "back_gates": back_gates,
        "combined_gates": transport.combine_gates(plan, back_gates),
    }
    repeats = all(torch.equal(transport.combine(plan, back_rows), found["combined"]) for _ in "123")
    unkept = transport.combine(plan, transport.replay(plan, x, keep=False))
    repeats &= torch.equal(unkept, transport.combine(plan, rows))
    on_cpu = {what: value.cpu().clone() for what, value in found.items()}
    return {**on_cpu, "max_packed": plan.max_packed, "repeats": repeats}


def expected_arrivals(name, world_size, tokens, choice, rank):
    """Rows, local ids and gates that rank must see: a loop over all tokens of all ranks."""
    each = E // world_size
    rows, ids, gates = [], [], []
    for source in range(world_size):
        x, routing = share(source, tokens[source], choice)
        for t in range(len(x)):
            local = [i - rank * each for i in routing.ids[t].tolist()]
            local = [i if 0 <= i < each else -1 for i in local]
            if max(local) >= 0 or name == "local":  # on one rank the arrived rows ARE x
                rows.append(x[t])
                ids.append(local)
                gates.append(routing.gate_weights[t])
    if not rows:
        return torch.zeros(0, H), torch.zeros(0, K, dtype=torch.int32), torch.zeros(0, K)
    return torch.stack(rows), torch.tensor(ids, dtype=torch.int32), torch.stack(gates)


MARKS = {"symm": [needs_interpreter], ("symm", 8): [pytest.mark.slow]}  # two minutes of it
RUNS = [
    pytest.param(name, ranks, marks=MARKS.get(name, []) + MARKS.get((name, ranks), []))
    for name in TRANSPORTS
    for ranks in (1, 2, 3, 4, 8)
]


@pytest.mark.parametrize("name, world_size", RUNS)
def test_moves(name, world_size, tmp_path):
    most = TRANSPORTS[name].caps.max_ranks or world_size
    if world_size > most:
        pytest.skip(f"caps of {name}: it serves {most} ranks at most, not {world_size}")
    check_cells(
        name, run_ranks(rank_moves, world_size, name, world_size, str(tmp_path), timeout=240.0)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ON_GPUS)
def test_moves_on_gpus(name, world_size, require_gpu):
    how = ON_GPUS[name]
    check_cells(name, run_ranks(rank_moves, world_size, name, world_size, None, "cuda", **how))


def check_cells(name, ranks):
    for shares, choice in ranks[0]:
        tokens = SHARES[shares][: len(ranks)]
        check_moves(name, tokens, choice, [got[shares, choice] for got in ranks])


def check_moves(name, tokens, choice, ranks):
    for rank, got in enumerate(ranks):
        rows, local_ids, gates = expected_arrivals(name, len(tokens), tokens, choice, rank)
        room = got["local_ids"].numel()
        somebodys = (got["local_ids"] >= 0).any(1)  # others are of buffers of a fixed size
        if name == "local":
            somebodys[:] = True
        out = ("rows", "replayed", "unkept", "replayed, unkept")
        for what in (*out, "gates", "local_ids", "back_rows", "back_gates"):
            got[what] = got[what][somebodys]
        assert torch.equal(got["local_ids"], local_ids)
        for what in out:
            assert_close(got[what], rows, name=f"rows ({what})", tolerance=0.0)
        here = local_ids >= 0
        assert int(here.sum()) <= got["max_packed"] <= room
        assert_close(got["gates"][here], gates[here], name="gates", tolerance=0.0)
        assert got["repeats"] or not TRANSPORTS[name].caps.deterministic
    # <dispatch(x), r> = <x, combine(r)>, summed over ranks: each is the other's transpose
    outward = sum((got["rows"] * got["back_rows"]).sum() for got in ranks)
    inward = sum(
        (share(rank, tokens[rank], choice)[0] * got["combined"]).sum()
        for rank, got in enumerate(ranks)
    )
    assert_close(inward, outward, name="adjoint of the rows")
    outward = sum((got["gates"] * got["back_gates"]).sum() for got in ranks)
    inward = sum(
        (share(rank, tokens[rank], choice)[1].gate_weights * got["combined_gates"]).sum()
        for rank, got in enumerate(ranks)
    )
    assert_close(inward, outward, name="adjoint of the gates")


def test_unknown_transport():
    with pytest.raises(
        ConfigError, match=r"transport = 'carrier pigeon'.*'?auto.*local.*collective"
    ):
        make_transport("carrier pigeon", ExpertParallel())


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
    x, routing = share(0, tokens, "random")
    return len(transport.dispatch(x, routing, E).rows)


def test_group_of_one_in_a_larger_world():
    assert run_ranks(rank_of_small_group, 2) == [5, 6]
