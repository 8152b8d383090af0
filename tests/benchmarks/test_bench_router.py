import json
import sys
from types import ModuleType

import pytest
import torch

from benchmarks import bench_router
from benchmarks.bench_router import BIASED, VARIANTS
from benchmarks.peers import Unavailable, largest_error
from benchmarks.routing_peers import FORWARD_ONLY, PEERS, eager
from ep_moe import SelectionConfig, ops

ARGS = [
    *("--num_experts=64", "--hidden_size=16", "--windows_ms=[0.1]", "--rest_ms=0", "--rounds=1"),
    f"--peers={['eager', *FORWARD_ONLY]}",
]
SERVED = sorted(set(VARIANTS) - {"grouped"})


def bias_of(variant, experts, device="cpu"):
    return torch.randn(experts, device=device) / 100 if variant in BIASED else None


def test_peers_that_only_select_are_skipped_in_words(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bench_router.main([*ARGS, "--tokens=[5, 6]", f"--results={tmp_path}"])
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("skipped")]
    for name in FORWARD_ONLY:
        for scope in ("backward", "losses", "backward, losses"):
            line = f"skipped {name} in plain, {scope}: it only selects"
            assert sum(one.startswith(line) for one in said) == 1  # not once more for 6 tokens
        assert f"skipped {name} in deepseek_v3, select: it runs on a GPU" in said
        assert any(one.startswith(f"skipped {name} in grouped, pack: its kernels") for one in said)
    rows = [json.loads(line) for line in (tmp_path / "router.jsonl").read_text().splitlines()]
    timed = {(row["case"]["scope"], row["impl"]) for row in rows}
    assert {impl for scope, impl in timed if scope != "logits"} == {"ep_moe", "eager"}


@pytest.mark.parametrize("name", FORWARD_ONLY)
def test_a_missing_package_is_named(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for package in ("vllm", "flag_gems", "sgl_kernel"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Unavailable, match="pip install"):
        PEERS[name](VARIANTS["plain"], None)


def test_experts_that_the_groups_of_sglang_do_not_take(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for experts in (96, 512):  # no power of two; 64 in each of 8 groups
        with pytest.raises(Unavailable, match="up to 32 in a group"):
            PEERS["sglang"](VARIANTS["deepseek_v3"], torch.zeros(experts))


def grouped_topk(
    scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func=0
):
    """As vLLM and FlagGems define it."""
    assert scoring_func == 1
    config = SelectionConfig(
        top_k=topk,
        num_expert_group=n_group,
        topk_group=topk_group,
        renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor,
        scoring_func="sigmoid",
        group_score="top2_sum",
    )
    return eager(config, bias)(scores)


def moe_fused_gate(
    input_tensor,
    bias,
    num_expert_group,
    topk_group,
    topk,
    num_fused_shared_experts=0,
    routed_scaling_factor=0,
    apply_routed_scaling_factor_on_output=False,
):
    """As SGLang defines it, which returns a list."""
    assert not num_fused_shared_experts
    assert apply_routed_scaling_factor_on_output
    groups = (num_expert_group, topk_group)
    return list(grouped_topk(input_tensor, *groups, topk, True, routed_scaling_factor, bias, 1))


def sgl_topk_softmax(topk_weights, topk_ids, gating_output, renormalize=False):
    config = SelectionConfig(top_k=topk_weights.shape[1], renormalize=renormalize)
    weights, ids = eager(config, None)(gating_output)
    topk_weights.copy_(weights)
    topk_ids.copy_(ids)


def topk_softmax(topk_weights, topk_ids, token_expert_indices, gating_output, renormalize=False):
    assert token_expert_indices.shape == topk_ids.shape
    assert {topk_ids.dtype, token_expert_indices.dtype} == {torch.int32}
    sgl_topk_softmax(topk_weights, topk_ids, gating_output, renormalize)


MODULES = {
    "vllm": {},
    "vllm._custom_ops": {"grouped_topk": grouped_topk, "topk_softmax": topk_softmax},
    "flag_gems": {},
    "flag_gems.fused": {"topk_softmax": topk_softmax},
    "flag_gems.runtime.backend._nvidia.hopper.grouped_topk": {"grouped_topk": grouped_topk},
    "sgl_kernel": {"moe_fused_gate": moe_fused_gate, "topk_softmax": sgl_topk_softmax},
}


@pytest.mark.parametrize("variant", SERVED)
@pytest.mark.parametrize("name", FORWARD_ONLY)
def test_kernels_are_called_by_their_signatures(name, variant, monkeypatch):
    """With plain torch in the place of the kernels, on a CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for path, contents in MODULES.items():
        module = ModuleType(path)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, path, module)
    same_as_ours(name, variant, torch.randn(50, 64))


@pytest.mark.gpu
@pytest.mark.usefixtures("require_gpu")
@pytest.mark.parametrize("variant", SERVED)
@pytest.mark.parametrize("name", FORWARD_ONLY)
def test_a_peer_selects_as_we_do(name, variant):
    same_as_ours(name, variant, torch.randn(100, 256, device="cuda"))


def same_as_ours(name, variant, logits):
    config = VARIANTS[variant]
    bias = bias_of(variant, logits.shape[1], logits.device)
    try:
        weights, ids = PEERS[name](config, bias)(logits)
    except Unavailable as reason:
        pytest.skip(str(reason))
    ours = ops.select(logits, config, expert_bias=bias)
    assert ids.dtype == torch.int32
    assert (ids != ours.ids).sum() <= 2  # two may change places that differ in the last bit
    assert largest_error(weights, ours.gate_weights) < 1e-3
