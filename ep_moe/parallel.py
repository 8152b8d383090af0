"""Where the program runs: torchrun's environment, this rank's device, and the expert-parallel
group.

`ep=` takes None, a ProcessGroup or a DeviceMesh everywhere; `ExpertParallel.resolve` is the one
place that knows.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ep_moe.errors import BackendUnavailable, ConfigError


@dataclass(frozen=True)
class ExpertParallel:
    """The ranks that share one set of experts. group is None for a process on its own; replicas are
    the ranks that hold the same experts as this one (EP x DP), None when there are no others."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    replicas: dist.ProcessGroup | None = None

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

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' values, on every rank; a new tensor."""
        total = value.clone()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return total

    def __deepcopy__(self, memo: dict[int, Any]) -> "ExpertParallel":
        return self  # a copy of a layer talks to the same ranks


@dataclass(frozen=True)
class Process:
    """This process among the ranks that torchrun started. group is None when it is alone."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None

    def close(self) -> None:
        """Leave the process group, if this process joined one."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group()


def init_process(
    *, timeout: timedelta = timedelta(minutes=5), environ: Mapping[str, str] = os.environ
) -> Process:
    """Join the ranks that torchrun started (NCCL with GPUs, gloo without), or stand alone when it
    did not.

    The device is bound before the first collective: ranks that all start on GPU 0 deadlock later.
    Every wait for a peer ends after `timeout`. Raises BackendUnavailable when this host has
    fewer visible GPUs than ranks.
    """
    rank, local_rank = int(environ.get("RANK", 0)), int(environ.get("LOCAL_RANK", 0))
    world_size = int(environ.get("WORLD_SIZE", 1))
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
    return Process(rank, local_rank, world_size, device, dist.group.WORLD)
