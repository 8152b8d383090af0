"""A checkpoint of something else: what would be left unread is named."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import ep_moe
from ep_moe.testing import run_ranks
from tests.helpers import small_config


def model_of(ep=None, extra=(), **changes):
    torch.manual_seed(0)
    model = nn.ModuleDict({"moe": ep_moe.MoELayer(small_config(**changes), ep=ep)})
    for name in extra:
        model[name] = nn.Linear(16, 16)
    return model


def optimizer_of(model, kind=torch.optim.AdamW):
    optimizer = kind(model.parameters(), lr=0.01)
    x = torch.randn(5, 16)
    for part in model.values():
        y = part(x)
        x = y if isinstance(y, torch.Tensor) else y[0]
    x.square().sum().backward()
    optimizer.step()
    return optimizer


def save(folder, ep=None, kind=torch.optim.AdamW, **changes):
    model = model_of(ep, **changes)
    ep_moe.save_checkpoint(folder, model, optimizer_of(model, kind), {"step": 3})
    return {name: value.clone() for name, value in model.state_dict().items()}


def load(folder, ep=None, kind=torch.optim.AdamW, **changes):
    """Into a model that has been trained in another way."""
    model = model_of(ep)
    optimizer = optimizer_of(model, kind)
    assert ep_moe.load_checkpoint(folder, model, optimizer, **changes) == {"step": 3}
    return dict(model.state_dict())


MORE = {  # what the file has more than the model, and what the error names
    "a layer": ({"extra": ("head", "tail")}, r"model\.head\.weight, model\.head\.bias"),
    "a bias of experts": ({"mlp_bias": True}, r"model\.moe\.experts\.b_gate_up"),
    "a buffer": ({"expert_bias": True}, r"model\.moe\.router\.expert_bias, which nothing here has"),
}


@pytest.mark.parametrize("changes,names", MORE.values(), ids=MORE)
def test_a_file_of_more_than_the_model(changes, names, tmp_path):
    saved = save(tmp_path, **changes)
    with pytest.raises(ep_moe.InputError, match=f"^checkpoint .*{names}.*strict=False"):
        load(tmp_path)
    loaded = load(tmp_path, strict=False)
    assert all(torch.equal(value, saved[name]) for name, value in loaded.items())


def test_optimizer_state_that_the_optimizer_has_no_place_for(tmp_path):
    """The largest second moments, of amsgrad, or both moments of experts that are frozen now."""
    save(tmp_path / "amsgrad", kind=partial(torch.optim.AdamW, amsgrad=True))
    with pytest.raises(ep_moe.InputError, match=r"optimizer\.state\.moe.*max_exp_avg_sq"):
        load(tmp_path / "amsgrad")
    save(tmp_path / "all")
    model = model_of()
    model["moe"].experts.w_down.requires_grad_(False)
    optimizer = optimizer_of(model)
    with pytest.raises(ep_moe.InputError, match=r"state\.moe\.experts\.w_down\.exp_avg"):
        ep_moe.load_checkpoint(tmp_path / "all", model, optimizer)
    ep_moe.load_checkpoint(tmp_path / "all", model, optimizer, strict=False)


@pytest.mark.parametrize("strict", [True, False])
def test_a_file_of_less_than_the_model(strict, tmp_path):
    save(tmp_path)
    model = model_of(extra=("head",))
    with pytest.raises(CheckpointException, match="head"):
        ep_moe.load_checkpoint(tmp_path, model, optimizer_of(model), strict=strict)


def rank_loads(rank, folder):
    save(folder, dist.group.WORLD, mlp_bias=True)
    with pytest.raises(ep_moe.InputError, match="b_down"):
        load(folder, dist.group.WORLD)
    dist.barrier()  # nobody waits inside the reading
    load(folder, dist.group.WORLD, strict=False)


def test_every_rank_refuses(tmp_path):
    run_ranks(rank_loads, 2, tmp_path)
