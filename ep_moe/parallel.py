"""Where the program runs: torchrun's environment, this rank's device, and the groups of ranks.

`ep=` takes None, a ProcessGroup or a DeviceMesh everywhere; `ExpertParallel.resolve` is the one
place that knows who shares experts, `Ranks.resolve` who adds up.
"""

import math
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ep_moe import check
from ep_moe.errors import BackendUnavailable, ConfigError
from ep_moe.peers import Peers, leave_all

TIMEOUT = timedelta(minutes=5)
MAX_NET = 256  # ranks that all connect to each other at once: a process may open 1024 files


@dataclass(frozen=True)
class ExpertParallel:
    """The ranks that share one set of experts. group is None for a process on its own; replicas are
    the ranks that hold the same experts as this one (EP x DP), None when there are no others."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    replicas: dist.ProcessGroup | None = None

    @property
    def peers(self) -> Peers:
        """The other ranks, shared by all layers of the group."""
        if self.group is None:
            raise ConfigError("ep", self, "a process group to have peers")
        return Peers.of(self.group)

    @classmethod
    def resolve(
        cls, ep: "dist.ProcessGroup | DeviceMesh | ExpertParallel | None"
    ) -> "ExpertParallel":
        """None = this process alone; a group = its ranks; a mesh = its only dimension, or the one
        named 'ep', and then the other dimension runs over the replicas."""
        if ep is None:
            return cls()
        if isinstance(ep, cls):
            return ep
        replicas = None
        if isinstance(ep, DeviceMesh):
            names = ep.mesh_dim_names or ()
            if ep.ndim > 2 or (ep.ndim == 2 and "ep" not in names):
                rule = "a DeviceMesh of one dimension, or of two of which one is named 'ep'"
                raise ConfigError("ep", ep, rule)
            if ep.ndim == 2:
                replicas = ep.get_group(1 - names.index("ep"))
            ep = ep.get_group("ep" if "ep" in names else None)
        if not isinstance(ep, dist.ProcessGroup):
            raise ConfigError("ep", ep, "None, a torch.distributed ProcessGroup or a DeviceMesh")
        return cls(group=ep, rank=dist.get_rank(ep), size=ep.size(), replicas=replicas)

    def local_experts(self, num_experts: int) -> range:
        """The global ids that live on this rank: consecutive, the same number on each."""
        if num_experts % self.size:
            raise ConfigError(
                "num_experts", num_experts, f"a multiple of the {self.size} ranks of `ep`"
            )
        each = num_experts // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def waiting(
        self, stage: str, splits: check.Splits | None = None
    ) -> AbstractContextManager[None]:
        """Around every wait for these ranks. It is bounded by the timeout of the group; when a peer
        dies, or is elsewhere, the failure becomes PeerLost or DispatchTimeout, which name it.

        Your own waits may use it: `with ep.waiting("gradients"): dist.all_reduce(...)`. Every rank
        must come here equally often, in the same order, with the same stage; EP_MOE_CHECK=1 holds
        them to it, and compares the splits of an all-to-all.
        """
        return nullcontext() if self.group is None else _waiting(self.group, stage, splits)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ExpertParallel":
        return self  # a copy of a layer talks to the same ranks


@dataclass(frozen=True)
class Ranks:
    """Ranks that add up: those of one group or, group after group, all of a mesh. Along its
    dimensions in turn a sum reaches every rank, without a group of all of them."""

    groups: tuple[dist.ProcessGroup, ...] = ()

    @classmethod
    def resolve(cls, over: "dist.ProcessGroup | DeviceMesh | ExpertParallel | None") -> "Ranks":
        """None = this process alone; a group = its ranks; a mesh of any number of dimensions = all
        of its ranks."""
        if isinstance(over, ExpertParallel):
            groups = (over.group, over.replicas)
            return cls(tuple(group for group in groups if group is not None))
        if isinstance(over, DeviceMesh):
            return cls(tuple(over.get_all_groups()))
        if over is None:
            return cls()
        if not isinstance(over, dist.ProcessGroup):
            rule = "None, a torch.distributed ProcessGroup or a DeviceMesh"
            raise ConfigError("balance_over", over, rule)
        return cls((over,))

    @property
    def size(self) -> int:
        return math.prod(group.size() for group in self.groups)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' values, on every rank; a new tensor. Of integers, so that the order
        in which they are added does not show."""
        total = value.clone()
        for group in self.groups:
            with _waiting(group, f"the sum of a tensor of shape {tuple(value.shape)}"):
                dist.all_reduce(total, group=group)
        return total

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        return self  # as ExpertParallel


def _waiting(
    group: dist.ProcessGroup, stage: str, splits: check.Splits | None = None
) -> AbstractContextManager[None]:
    if group.size() == 1:
        return nullcontext()
    peers = Peers.of(group)
    if check.wanted():
        check.same_exchange(peers, stage, splits)
    return peers.waiting(stage)


@dataclass(frozen=True)
class Process:
    """This process among the ranks that torchrun started. group is None when it is alone."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None
    timeout: timedelta = TIMEOUT

    def new_group(self) -> dist.ProcessGroup | None:
        """Another group of all ranks with the same timeout, for experts beside what uses `group`:
        each has an order of exchanges of its own. Every rank must call it. None when alone."""
        if self.group is None:
            return None
        return cast(dist.ProcessGroup, dist.new_group(timeout=self.timeout))  # all are members

    def close(self) -> None:
        """Leave the process group, if this process joined one; never waits for a peer."""
        if self.group is not None and dist.is_initialized():
            leave_all()
            dist.destroy_process_group()


def init_process(*, timeout: timedelta = TIMEOUT) -> Process:
    """Join the ranks that torchrun started (NCCL with GPUs, gloo without), or stand alone when it
    did not.

    The device is bound before the first collective: ranks that all start on GPU 0 deadlock later.
    Every wait for a peer ends after `timeout`. Raises BackendUnavailable when this host has
    fewer visible GPUs than ranks.
    """
    rank, local_rank, world_size = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
    )
    gpus = torch.cuda.device_count()
    if gpus and local_rank >= gpus:
        raise BackendUnavailable(
            f"rank {rank} has LOCAL_RANK {local_rank}, but this host shows {gpus} GPUs: start at "
            "most one rank per GPU (--nproc-per-node) or show more of them (CUDA_VISIBLE_DEVICES)"
        )
    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    if world_size == 1:
        return Process(rank, local_rank, world_size, device, None)
    dist.init_process_group(
        "nccl" if gpus else "gloo", timeout=timeout, device_id=device if gpus else None
    )
    group = dist.group.WORLD
    if group is not None and world_size <= MAX_NET:
        Peers.of(group)  # from now on a rank that dies has a name, long before the first layer
    return Process(rank, local_rank, world_size, device, group, timeout)
