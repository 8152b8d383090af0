"""What builds and generations of DeepEP take that others do not."""

import importlib
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ep_moe import BackendUnavailable
from ep_moe.dispatch import deepep, deepep_buffers
from ep_moe.testing import assert_close, run_ranks
from tests.dispatch.ep_cases import Case, config, make_layer
from tests.dispatch.fake_deepep import GENERATIONS, core, stand_in
from tests.dispatch.test_deepep import BF16, SIZES, assert_same, data, make, peer_of, results


def narrow_ids(rank, generation):
    stand_in(generation)
    library = importlib.import_module(f"tests.dispatch.fake_deepep.{GENERATIONS[generation]}")
    library.topk_idx_t = core.topk_idx_t = torch.int32
    layer = make(SIZES)
    assert_same(results(layer, rank), results(peer_of(layer), rank))
    if generation == "v2":  # the only one with both
        few = replace(SIZES, transport="deepep_low_latency", max_tokens_per_rank=8)
        few = make_layer(Case((), few, dtype=BF16), dist.group.WORLD)
        with torch.no_grad():
            x = data(rank, 40, 5)[0]
            assert_close(few(x)[0], peer_of(layer)(x)[0], name="y")


@pytest.mark.parametrize("generation", ["v2", "v2.5"])
def test_a_build_with_narrow_ids(generation):
    """EP_NUM_TOPK_IDX_BITS=32, where DeepEP is built."""
    run_ranks(narrow_ids, 2, generation)


def too_wide(rank, generation):
    stand_in(generation)
    layer = make(config(num_experts=12, top_k=1, hidden_size=7937))
    if generation == "v1":
        with pytest.raises(BackendUnavailable, match=r"at most 7936 columns.*padded, 8192: .*symm"):
            layer(data(rank, 7937, 2)[0])
        layer = make(config(num_experts=12, top_k=1, hidden_size=7936))
    layer(data(rank, layer.config.hidden_size, 2)[0])


@pytest.mark.parametrize("generation", ["v1", "v2.5"])
def test_rows_that_v1_has_no_room_for(generation):
    """Its kernel would trap, and the process could do nothing more on the GPU."""
    run_ranks(too_wide, 2, generation)


def over_hosts(rank, generation):
    stand_in(generation)
    for layer, backward in ((make(SIZES), False), (make(replace(SIZES, hidden_size=300)), True)):
        layer.warmup(4, backward=backward)
        made = layer.ep.peers.shared["deepep, 16 sms"].buffers[-1]
        assert made.ordered == backward
        made.buffer.num_scaleout_ranks = 2
        deepep.capturing = deepep_buffers.capturing = lambda: True
        x = data(rank, layer.config.hidden_size, 3)[0]
        if not backward:
            with torch.no_grad():
                layer(x)
        else:
            with pytest.raises(BackendUnavailable, match=r"several hosts.*backward=False"):
                layer(x)
        deepep.capturing = deepep_buffers.capturing = lambda: False


@pytest.mark.parametrize("generation", ["v2", "v2.5"])
def test_a_graph_of_training_over_several_hosts(generation):
    """Its sort indexes by a mask there, whose length the host waits for."""
    run_ranks(over_hosts, 2, generation)
