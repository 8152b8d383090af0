"""The layers in configs/ against Hugging Face: their semantics are those of the family that was
compared, their sizes those that the family's config class was named after."""

from pathlib import Path

import pytest

from ep_moe import MoEConfig
from tests.families.table import FAMILIES, transformers

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = {
    "Mixtral": "mixtral_8x7b",
    "Qwen2-MoE": "qwen1_5_moe_a2_7b",
    "Qwen3-MoE": "qwen3_30b_a3b",
    "OLMoE": "olmoe",
    "DeepSeek-V2": "deepseek_v2",
    "DeepSeek-V3": "deepseek_v3",
    "GLM-4.5": "glm45_air",
    "GPT-OSS": "gpt_oss_120b",
    "Llama-4": "llama4_scout",
}
SWITCHES = (
    "scoring_func",
    "renormalize",
    "group_score",
    "expert_bias",
    "router_bias",
    "activation",
    "gate_on",
    "mlp_bias",
    "shared_expert_gate",
)


def shipped(name):
    return MoEConfig.from_yaml(CONFIGS / f"{SHIPPED[name]}.yaml")


@pytest.mark.parametrize("name", SHIPPED)
def test_semantics_are_the_familys(name):
    ours, compared = shipped(name), FAMILIES[name].moe_config()
    assert {s: getattr(ours, s) for s in SWITCHES} == {s: getattr(compared, s) for s in SWITCHES}
    for switch in ("shared_size", "num_expert_group", "routed_scaling_factor"):
        on = [getattr(config, switch) > 1 for config in (ours, compared)]
        assert on[0] == on[1], switch


# The defaults of the other two are of no published model.
@pytest.mark.parametrize("name", SHIPPED.keys() - {"OLMoE", "DeepSeek-V2"})
def test_sizes_are_the_defaults_of_the_familys_config(name):
    family, ours = FAMILIES[name], shipped(name)
    theirs = getattr(transformers, family.config)()
    intermediate_size, num_experts = family.names
    names = {
        "hidden_size": "hidden_size",
        "num_experts_per_tok": "top_k",
        intermediate_size: "intermediate_size",
        num_experts: "num_experts",
        "n_group": "num_expert_group",
        "topk_group": "topk_group",
        "n_shared_experts": "num_shared_experts",
        "shared_expert_intermediate_size": "shared_size",
        "routed_scaling_factor": "routed_scaling_factor",
    }
    both = {ours: getattr(theirs, name) for name, ours in names.items() if hasattr(theirs, name)}
    assert both == {name: getattr(ours, name) for name in both}
