"""What holds tensors compares by identity: their own == has no truth value."""

import dataclasses
import importlib
import pickle
import pkgutil
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

import ep_moe
from ep_moe.dispatch.collective import CollectivePlan
from ep_moe.dispatch.local import LocalPlan
from ep_moe.traces import RoutingTrace
from ep_moe.types import Arrived, Packed


def dataclasses_with_tensors():
    """Of the whole package; a plan or a list of anything may hold them, too."""
    found = set()
    for module in pkgutil.walk_packages(ep_moe.__path__, "ep_moe."):
        for kind in vars(importlib.import_module(module.name)).values():
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                hints = get_type_hints(kind).values()
                if any(hint in (Tensor, list[Any]) or Tensor in hint_args(hint) for hint in hints):
                    found.add(kind)
    return found


def hint_args(hint):
    return getattr(hint, "__args__", ())


def test_dataclasses():
    kinds = dataclasses_with_tensors()
    named = {Arrived, CollectivePlan, LocalPlan, Packed, RoutingTrace}
    assert kinds >= named | {ep_moe.Routing, ep_moe.RoutingRecord}
    assert {kind for kind in kinds if kind.__eq__ is not object.__eq__} == set()
    assert {kind for kind in kinds if kind.__hash__ is not object.__hash__} == set()


@pytest.mark.parametrize("kind, fields", [(ep_moe.Routing, 2), (ep_moe.RoutingStats, 4)])
def test_values_in_use(kind, fields):
    """Found in a list and used as a key, and not equal to another that looks alike."""
    first, second = (kind(*(torch.ones(2, 3) for _ in range(fields))) for _ in "ab")
    assert first == first
    assert (first == second, first != second) == (False, True)
    assert second in [first, second]
    assert {first: 1, second: 2}[second] == 2
    assert pickle.loads(pickle.dumps(first)) != first
