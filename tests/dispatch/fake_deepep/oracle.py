"""Rows that say where they came from, and a loop that says where they must go."""

import pytest
import torch

E, K, H, C = 12, 3, 256, 8
TOKENS = (5, 0, 7, 8)
SMS = 8


def share(rank, seed=0):
    """x[t] = (rank, t, ...), so that a row says where it came from."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    tokens = TOKENS[rank]
    x = torch.randn(tokens, H, generator=generator).bfloat16()
    x[:, 0], x[:, 1] = rank, torch.arange(tokens)
    ids = torch.rand(tokens, E, generator=generator).argsort(1)[:, :K]
    ids[torch.rand(tokens, K, generator=generator) < 0.2] = -1
    return x, ids.contiguous(), torch.rand(tokens, K, generator=generator)


def made(of_rank, source, token):
    """What a rank makes of an arrived row, and a gradient for each of its gate weights."""
    generator = torch.Generator().manual_seed(10_000 * of_rank + 100 * source + token)
    return (
        torch.randn(H, generator=generator).bfloat16(),
        torch.rand(K, generator=generator),
    )


def arrivals(me, world_size):
    """(source, token, local ids, weights) of every row that must arrive, in order."""
    each = E // world_size
    for source in range(world_size):
        _, ids, weights = share(source)
        for token in range(len(ids)):
            local = [i - me * each if 0 <= i - me * each < each else -1 for i in ids[token]]
            if max(local) >= 0:
                yield source, token, local, weights[token]


def combined(me, world_size, biases=()):
    """The sum that must come back, in fp32 and rounded once, and the weights' gradients."""
    each, (x, ids, _) = E // world_size, share(me)
    total = torch.zeros(len(x), H)
    for bias in biases:
        total += bias.float()
    grads = torch.zeros(len(x), K)
    for token in range(len(x)):
        for rank in sorted({int(i) // each for i in ids[token] if i >= 0}):
            row, weights = made(rank, me, token)
            total[token] += row.float()
            for k in range(K):
                if ids[token, k] >= 0 and ids[token, k] // each == rank:
                    grads[token, k] = weights[k]
    return total.bfloat16(), grads


def answers(rows, expected, weights_everywhere):
    """Rows in the order they came; checks ids and weights of each."""
    recv_x, recv_ids, recv_weights = rows
    wanted = {(source, token): (ids, weights) for source, token, ids, weights in expected}
    found = []
    for row in range(len(expected)):
        source, token = int(recv_x[row, 0]), int(recv_x[row, 1])
        ids, weights = wanted.pop((source, token))
        assert torch.equal(recv_x[row], share(source)[0][token])
        assert recv_ids[row].tolist() == ids
        if not weights_everywhere:
            weights = weights.masked_fill(torch.tensor(ids) < 0, 0.0)
        assert torch.equal(recv_weights[row], weights)
        found.append((source, token))
    assert not wanted
    return found


def refused(error, match, call):
    with pytest.raises(error, match=match or None):
        call()
