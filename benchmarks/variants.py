"""Layers of the same weights that differ in how they work, to be measured together."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.loads import Given
from benchmarks.rows import VARIANT, words
from ep_moe import ConfigError, MoEConfig, MoELayer, Routing
from ep_moe.dispatch import TRANSPORTS
from ep_moe.parallel import Process

# Fields that change neither the parameters nor what is computed from them.
VARIED = ("pipeline_chunks", "shared_expert_overlap", "transport", "experts_keep", "numerics")


def variants_of(moe: MoEConfig, changes: Sequence[Mapping[str, Any]]) -> dict[str, MoEConfig]:
    """Name -> layer, for each set of changes to `moe`. Raises ConfigError for one that would
    measure another layer, or the same one again."""
    found: dict[str, MoEConfig] = {}
    for change in changes:
        if unknown := sorted(set(change) - set(VARIED)):
            raise ConfigError("variants", unknown, f"of {', '.join(VARIED)}")
        variant = replace(moe, **change)
        if variant == moe or variant in found.values():
            rule = "different from the layer itself, and from each other"
            raise ConfigError("variants", dict(change), rule)
        found[f"{VARIANT}{words(change)}"] = variant
    return found


def bounded(moe: MoEConfig, tokens: int) -> MoEConfig:
    """With `max_tokens_per_rank` where the transport wants it and nobody has said: sizes are static
    there, and more than needed cost time."""
    transport = TRANSPORTS.get(moe.transport)
    if transport is None or not transport.caps.fixed_size or moe.max_tokens_per_rank is not None:
        return moe
    return replace(moe, max_tokens_per_rank=tokens)


def layer_of(
    moe: MoEConfig, like: MoELayer, *, tokens: int, process: Process, routing: Routing | None
) -> MoELayer:
    """Another layer on the parameters of `like`, for so many tokens; routing: where they go."""
    with torch.device("meta"):
        layer = MoELayer(bounded(moe, tokens), ep=process.group)
    layer.load_state_dict(like.state_dict(keep_vars=True), assign=True)
    if routing is not None:
        layer.router.forced = Given(moe, routing.ids)
    return layer
