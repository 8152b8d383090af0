"""Hugging Face's own blocks as independent oracles: tiny, random, offline.

Same weights, then the same ids and gate weights (seen where the block hands them to its experts),
the same output, and the same gradient of every parameter and of x. They cast router logits to fp32
even in float64, so that is how sharp a comparison can be.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ep_moe import MoEConfig, MoELayer
from ep_moe.testing import assert_close

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

H, I, E, K = 16, 12, 8, 3  # noqa: E741  # the names of the glossary
SIZES = {"hidden_size": H, "intermediate_size": I, "num_experts": E, "top_k": K}
EXPERTS = {"experts.w_gate_up": "experts.gate_up_proj", "experts.w_down": "experts.down_proj"}


class Family(NamedTuple):
    """block: builds theirs; config: ours; names: our parameter -> theirs, same layout unless
    `convert` says otherwise (a function of their named tensors)."""

    block: Callable[[], nn.Module]
    config: MoEConfig
    names: dict[str, str]
    convert: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {}  # noqa: RUF012  # read only


def mixtral() -> nn.Module:
    from transformers.models.mixtral import modeling_mixtral as m

    config = m.MixtralConfig(
        hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=K
    )
    return eager(m.MixtralSparseMoeBlock, config)


def qwen3(norm_topk_prob: bool) -> Callable[[], nn.Module]:
    def build():
        from transformers.models.qwen3_moe import modeling_qwen3_moe as m

        config = m.Qwen3MoeConfig(
            hidden_size=H,
            moe_intermediate_size=I,
            num_experts=E,
            num_experts_per_tok=K,
            norm_topk_prob=norm_topk_prob,
        )
        return eager(m.Qwen3MoeSparseMoeBlock, config)

    return build


def deepseek_v3(**changes: Any) -> Callable[[], nn.Module]:
    def build():
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as m

        config = m.DeepseekV3Config(
            hidden_size=H,
            moe_intermediate_size=I,
            n_routed_experts=E,
            num_experts_per_tok=K,
            routed_scaling_factor=2.5,
            **changes,
        )
        return eager(m.DeepseekV3MoE, config)

    return build


def gpt_oss() -> nn.Module:
    from transformers.models.gpt_oss import modeling_gpt_oss as m

    config = m.GptOssConfig(
        hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=K
    )
    return eager(m.GptOssMLP, config)


def eager(block: type[nn.Module], config: Any) -> nn.Module:
    config._experts_implementation = "eager"
    return block(config)


def join_shared(theirs: dict[str, Tensor]) -> Tensor:
    gate, up = (theirs[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up"))
    return torch.cat([gate, up])


def split_interleaved(name: str) -> Callable[[dict[str, Tensor]], Tensor]:
    """GPT-OSS stores (E,H,2I) with gate and up columns taking turns; a bias (E,2I) likewise."""

    def convert(theirs):
        value = theirs[name]
        value = torch.cat([value[..., ::2], value[..., 1::2]], dim=-1)
        return value.mT if value.ndim == 3 else value

    return convert


DEEPSEEK = Family(
    deepseek_v3(n_group=1, topk_group=1, n_shared_experts=1),
    MoEConfig(
        **SIZES,
        num_shared_experts=1,
        scoring_func="sigmoid",
        expert_bias=True,
        group_score="top2_sum",
        routed_scaling_factor=2.5,
    ),
    EXPERTS
    | {
        "router.weight": "gate.weight",
        "router.expert_bias": "gate.e_score_correction_bias",
        "shared_experts.w_down": "shared_experts.down_proj.weight",
    },
    {"shared_experts.w_gate_up": join_shared},
)
GROUPS = {"num_expert_group": 4, "topk_group": 2, "num_shared_experts": 2}
FAMILIES = {
    "Mixtral": Family(mixtral, MoEConfig(**SIZES), EXPERTS | {"router.weight": "gate.weight"}),
    "Qwen3-MoE": Family(
        qwen3(True), MoEConfig(**SIZES), EXPERTS | {"router.weight": "gate.weight"}
    ),
    "Qwen3-MoE, not renormalised": Family(
        qwen3(False),
        MoEConfig(**SIZES, renormalize=False),
        EXPERTS | {"router.weight": "gate.weight"},
    ),
    "DeepSeek-V3": DEEPSEEK,
    "DeepSeek-V3, groups": DEEPSEEK._replace(
        block=deepseek_v3(n_group=4, topk_group=2, n_shared_experts=2),
        config=MoEConfig(**(vars(DEEPSEEK.config) | GROUPS)),
    ),
    "DeepSeek-V3, not renormalised": DEEPSEEK._replace(
        block=deepseek_v3(n_group=1, topk_group=1, n_shared_experts=1, norm_topk_prob=False),
        config=MoEConfig(**(vars(DEEPSEEK.config) | {"renormalize": False})),
    ),
    "GPT-OSS": Family(
        gpt_oss,
        MoEConfig(**SIZES, activation="swiglu_clamped", mlp_bias=True, router_bias=True),
        {
            "router.weight": "router.weight",
            "router.bias": "router.bias",
            "experts.b_down": "experts.down_proj_bias",
        },
        {
            "experts.w_gate_up": split_interleaved("experts.gate_up_proj"),
            "experts.b_gate_up": split_interleaved("experts.gate_up_proj_bias"),
            "experts.w_down": lambda theirs: theirs["experts.down_proj"].mT,
        },
    ),
}


def as_ours(family: Family, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their weights, or their gradients, by our names and in our layout."""
    same = {ours: theirs[name] for ours, name in family.names.items() if name in theirs}
    return same | {ours: convert(theirs) for ours, convert in family.convert.items()}


def randomize(block: nn.Module) -> None:
    with torch.no_grad():
        for name, value in block.state_dict().items():
            value.normal_(std=0.3)
            if "experts" in name and "weight" not in name:
                value *= 3  # wide enough that GPT-OSS clamps


def routing_of(block: nn.Module, x: Tensor) -> tuple[Any, Tensor, Tensor]:
    """The block's output, and the ids and gate weights that reached its experts."""
    seen = []

    def look(module, args, kwargs):
        # Some blocks pass them by position, some by name; ids are the integers among them.
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        seen.extend(tensors[1:])

    with block.experts.register_forward_pre_hook(look, with_kwargs=True):
        out = block(x)
    (ids,) = (t for t in seen if not t.is_floating_point())
    (weights,) = (t for t in seen if t.is_floating_point())
    return out, ids, weights


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_equals_hugging_face(family, dtype):
    block = family.block()
    randomize(block)
    block = block.to(dtype)
    for buffer in block.buffers():  # the checkpoint's selection bias is fp32 and stays so
        buffer.data = buffer.data.float()
    layer = MoELayer(family.config).to(dtype)
    layer.load_state_dict(as_ours(family, dict(block.state_dict())))

    theirs = torch.randn(2, 17, H).to(dtype).requires_grad_()
    ours = theirs.detach().clone().requires_grad_()
    expected, expected_ids, expected_gates = routing_of(block, theirs)
    if isinstance(expected, tuple):  # GPT-OSS: (output, router scores)
        expected = expected[0]
    routing, _ = layer.router(ours.view(-1, H), None)
    ids, order = routing.ids.sort(dim=1)
    expected_ids, their_order = expected_ids.view(-1, K).sort(dim=1)
    assert torch.equal(ids, expected_ids.int())
    assert_close(
        routing.gate_weights.gather(1, order),
        expected_gates.view(-1, K).gather(1, their_order),
        name="gate weights",
        tolerance=1e-5,
    )

    y, _ = layer(ours)
    assert_close(y, expected, name="y", tolerance=1e-5)
    d_y = torch.randn_like(y)
    y.backward(d_y)
    expected.backward(d_y)
    assert_close(ours.grad, theirs.grad, name="dx", tolerance=1e-5)
    gradients = as_ours(family, {n: p.grad for n, p in block.named_parameters()})
    assert gradients.keys() == dict(layer.named_parameters()).keys()
    for name, parameter in layer.named_parameters():
        assert_close(parameter.grad, gradients[name], name=f"d {name}", tolerance=1e-5)
