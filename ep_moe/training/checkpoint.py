"""Checkpoints that any number of ranks writes and any number reads.

torch.distributed.checkpoint does the work. What it must be told is that rank r's experts are the
r-th slice of a larger tensor, in the parameters AND in the optimizer's moments: plain tensors of
the same name on each rank would be taken for replicas, and all but one rank's experts would be
lost.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import _get_fqns, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ep_moe.errors import InputError
from ep_moe.training.expert_parameters import expert_parameters


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write parameters, buffers, optimizer state and `extra` (what JSON can hold) into the
    directory `path`. All ranks call it."""
    state = {**_global_state(model, optimizer), "extra": json.dumps(extra or {})}
    with _one_process_is_meant():
        save(state, checkpoint_id=path)


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    strict: bool = True,
) -> dict[str, Any]:
    """Read into model and optimizer what any number of ranks wrote; returns `extra`.

    Missing keys and wrong shapes raise; so does what the file holds and the model or the optimizer
    lacks, unless strict is False: then it is left unread. All ranks call it.
    """
    state = {**_global_state(model, optimizer), "extra": ""}
    if strict:
        _refuse_unread(path, state)
    with _one_process_is_meant():
        load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=_local(state["model"]),
        optim_state_dict=_local(state["optimizer"]),
    )
    return json.loads(state["extra"])


def _refuse_unread(path: str | Path, state: dict[str, Any]) -> None:
    """Parameters, buffers and optimizer state of the file that would go nowhere."""
    moments = state["optimizer"]["state"]
    wanted = {("model", name) for name in state["model"]}
    wanted |= {("optimizer", "state", name, key) for name in moments for key in moments[name]}
    paths = FileSystemReader(path).read_metadata().planner_data
    unread = [
        name
        for name, path in paths.items()
        if (path[0] == "model" and path[:2] not in wanted)
        or (path[:2] == ("optimizer", "state") and path[:4] not in wanted)
    ]
    if unread:
        shown = ", ".join(unread[:8]) + (f" and {len(unread) - 8} more" if unread[8:] else "")
        rule = "of the same model and optimizer, or read with strict=False"
        raise InputError(f"checkpoint {path}", f"one with {shown}, which nothing here has", rule)


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """torch warns whenever there is no process group, whatever it is told."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _global_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Both state dicts by fully qualified name, expert tensors as DTensors sharded over the ranks
    of their group."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    model_state, optimizer_state = get_state_dict(model, optimizer)
    moments: dict[str, Any] = dict(optimizer_state["state"])  # pyright: ignore
    meshes: dict[int, DeviceMesh] = {}
    for name, parameter, experts in expert_parameters(model):
        ep = experts.ep
        if ep.group is None:
            continue
        if id(ep.group) not in meshes:
            meshes[id(ep.group)] = DeviceMesh.from_group(ep.group, parameter.device.type)
        mesh = meshes[id(ep.group)]
        (name,) = _get_fqns(model, name)  # without the names that wrappers add
        model_state[name] = _shard(model_state[name], mesh)
        if name in moments:  # not those of frozen experts; a new dict: this one is the optimizer's
            moments[name] = {
                key: _shard(value, mesh) if _by_expert(key, value, parameter) else value
                for key, value in moments[name].items()
            }
    return {"model": model_state, "optimizer": {**optimizer_state, "state": moments}}


def _by_expert(key: str, value: Any, parameter: Tensor) -> bool:
    """Does dimension 0 of this optimizer state run over the local experts?"""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return False
    if len(value) != len(parameter):
        got = f"of shape {tuple(value.shape)}"
        raise InputError(f"optimizer state {key!r}", got, f"a scalar or ({len(parameter)}, ...)")
    return True


def _shard(local: Any, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def _local(state: Any) -> Any:
    if isinstance(state, DTensor):
        return state.to_local()
    if isinstance(state, dict):
        return {key: _local(value) for key, value in state.items()}
    return state
