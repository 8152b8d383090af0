"""EP_MOE_CHECK=1: find the fault before it turns into a hang or into wrong numbers.

Before every exchange the ranks compare what they are about to do, and indices are validated on the
device that they live on. It costs a round of messages per exchange and host syncs, so it is for
looking for a fault, not for training. All ranks must set it alike.
"""

import os
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from ep_moe.errors import CallMismatch, InputError, SplitMismatch
from ep_moe.peers import Peers


class Splits(NamedTuple):
    """Rows of one rank in an all-to-all: sent[d] to rank d, expected[s] from rank s."""

    sent: list[int]
    expected: list[int]


def wanted() -> bool:
    """Read where it is used, so that a running program can look closer."""
    return os.environ.get("EP_MOE_CHECK", "0") not in ("", "0")


def same_exchange(peers: Peers, stage: str, splits: Splits | None = None) -> None:
    """Raise CallMismatch unless all ranks are at the same stage, and SplitMismatch unless each
    sends what its peer expects: the same error on every rank, before any data moves."""
    word = [stage, peers.last_stage, splits]
    stages, lasts, all_splits = zip(*peers.gather(word, stage), strict=True)
    if len(set(stages)) > 1:
        found = "; ".join(
            f"rank {rank} is at {stage}, after {last}"
            for rank, stage, last in zip(peers.ranks, stages, lasts, strict=True)
        )
        raise CallMismatch(
            f"the ranks are about to exchange different things: {found}. Every rank must call the "
            "same layers equally often, in the same order, forward and backward"
        )
    if splits is not None:
        bad = mismatched_splits([Splits(*of_rank) for of_rank in all_splits])
        if bad:
            raise SplitMismatch(bad, stage)


def mismatched_splits(splits: list[Splits]) -> list[tuple[int, int, int, int]]:
    """(source, destination, sent, expected) of every pair of ranks that disagree.

    sent [[2,3],[4,5]], expected [[2,4],[3,6]] -> [(1,1,5,6)]
    """
    return [
        (source, destination, mine.sent[destination], theirs.expected[source])
        for source, mine in enumerate(splits)
        for destination, theirs in enumerate(splits)
        if mine.sent[destination] != theirs.expected[source]
    ]


def local_ids(ids: Tensor, num_local_experts: int) -> None:
    """Raise InputError unless all of (A,K) are experts of this rank, or -1."""
    if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < num_local_experts:
        got = f"between {int(ids.min())} and {int(ids.max())}"
        rule = f"-1 (elsewhere) or 0 to {num_local_experts - 1}: {num_local_experts} experts here"
        raise InputError("local_ids", got, rule)


def offsets(sums: Tensor, num_experts: int | None, num_rows: int) -> list[int]:
    """The offsets on the host. Raise InputError unless they are num_experts + 1 exclusive
    cumulative sums that fit: lengths or inclusive ends passed as offsets are refused, not guessed.
    """
    ends = sums.tolist()
    length = len(ends) if num_experts is None else num_experts + 1
    ordered = all(a <= b for a, b in pairwise(ends))
    if not ends or len(ends) != length or ends[0] != 0 or not ordered or ends[-1] > num_rows:
        count = "num_experts + 1" if num_experts is None else length
        rule = f"{count} exclusive cumulative sums from 0 to at most {num_rows} rows"
        raise InputError("offsets", ends, rule)
    return ends
