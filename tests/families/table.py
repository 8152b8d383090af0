"""Model families: their block in Hugging Face transformers, our config of the same layer, and where
each of our weights stands in their checkpoint. Tiny, random, offline.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ep_moe import MoEConfig

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

H, I, E, K = 16, 12, 8, 3  # noqa: E741  # the names of the glossary

Weights = dict[str, Tensor]
Layout = dict[str, Callable[[Weights], Tensor]]


class Family(NamedTuple):
    """A row of the table.

    model      the folder in transformers.models
    config     their config class
    block      their class of the whole layer
    names      what their config calls intermediate_size and num_experts
    layout     our parameter or buffer, read from theirs by name
    theirs     what their config is told besides the sizes
    ours       what ours is told besides the sizes
    build      what their block is told besides its config
    """

    model: str
    config: str
    block: str
    names: tuple[str, str]
    layout: Layout
    theirs: dict[str, Any]
    ours: dict[str, Any]
    build: dict[str, Any] = {}  # noqa: RUF012  # read only

    def moe_config(self, **sizes: int) -> MoEConfig:
        defaults = {"hidden_size": H, "intermediate_size": I, "num_experts": E, "top_k": K}
        return MoEConfig(**(defaults | self.ours | sizes))

    def random_block(self, **sizes: int) -> nn.Module:
        config, (intermediate_size, num_experts) = self.moe_config(**sizes), self.names
        theirs = getattr(transformers, self.config)(
            **{
                "hidden_size": config.hidden_size,
                "num_experts_per_tok": config.top_k,
                intermediate_size: config.intermediate_size,
                num_experts: config.num_experts,
            },
            **self.theirs,
        )
        theirs._experts_implementation = "eager"
        module = importlib.import_module(f"transformers.models.{self.model}.modeling_{self.model}")
        block = getattr(module, self.block)(theirs, **self.build)
        with torch.no_grad():
            for name, value in block.state_dict().items():
                # experts wide enough that GPT-OSS clamps, router narrow enough that nothing ties
                value.normal_(std=0.9 if name.startswith("experts.") else 0.3)
        return block

    def as_ours(self, theirs: Weights, *, but: tuple[str, ...] = ()) -> Weights:
        """Their weights, or their gradients, by our names and in our layout; `but` are beginnings
        of names to leave out."""
        return {n: read(theirs) for n, read in self.layout.items() if not n.startswith(but)}


def same(name: str) -> Callable[[Weights], Tensor]:
    return lambda theirs: theirs[name]


def transposed(name: str) -> Callable[[Weights], Tensor]:
    """(E,in,out), as GPT-OSS and Llama-4 multiply from the right -> (E,out,in)"""
    return lambda theirs: theirs[name].mT


def interleaved(name: str) -> Callable[[Weights], Tensor]:
    """gate and up taking turns in the last dimension, as in GPT-OSS -> gate half, up half"""
    return lambda theirs: torch.cat([theirs[name][..., ::2], theirs[name][..., 1::2]], dim=-1)


def joined(module: str) -> Callable[[Weights], Tensor]:
    """gate_proj and up_proj, each (I,H) -> (2I,H)"""
    names = [f"{module}.{name}_proj.weight" for name in ("gate", "up")]
    return lambda theirs: torch.cat([theirs[name] for name in names])


GATE: Layout = {"router.weight": same("gate.weight")}
SELECTION_BIAS: Layout = {"router.expert_bias": same("gate.e_score_correction_bias")}
EXPERTS: Layout = {
    "experts.w_gate_up": same("experts.gate_up_proj"),
    "experts.w_down": same("experts.down_proj"),
}
EXPERTS_IN_OUT: Layout = {
    "experts.w_gate_up": transposed("experts.gate_up_proj"),
    "experts.w_down": transposed("experts.down_proj"),
}


def shared(module: str) -> Layout:
    return {
        "shared_experts.w_gate_up": joined(module),
        "shared_experts.w_down": same(f"{module}.down_proj.weight"),
    }


MIXTRAL = Family(
    model="mixtral",
    config="MixtralConfig",
    block="MixtralSparseMoeBlock",
    names=("intermediate_size", "num_local_experts"),
    layout=GATE | EXPERTS,
    theirs={},
    ours={},
)
QWEN2 = Family(
    model="qwen2_moe",
    config="Qwen2MoeConfig",
    block="Qwen2MoeSparseMoeBlock",
    names=("moe_intermediate_size", "num_experts"),
    layout=GATE
    | EXPERTS
    | shared("shared_expert")
    | {"shared_experts.w_gate": same("shared_expert_gate.weight")},
    theirs={"shared_expert_intermediate_size": 20},
    ours={
        "renormalize": False,
        "num_shared_experts": 1,
        "shared_intermediate_size": 20,
        "shared_expert_gate": True,
    },
)
QWEN3 = Family(
    model="qwen3_moe",
    config="Qwen3MoeConfig",
    block="Qwen3MoeSparseMoeBlock",
    names=("moe_intermediate_size", "num_experts"),
    layout=GATE | EXPERTS,
    theirs={"norm_topk_prob": True},
    ours={},
)
OLMOE = Family(
    model="olmoe",
    config="OlmoeConfig",
    block="OlmoeSparseMoeBlock",
    names=("intermediate_size", "num_experts"),
    layout=GATE | EXPERTS,
    theirs={},
    ours={"renormalize": False},
)
# DeepSeek-V2 masks the groups left out with a score of 0, where we rank them below -inf: the same
# unless scores of the kept groups underflow to 0, where it may choose, at weight 0, outside them.
DEEPSEEK_V2 = Family(
    model="deepseek_v2",
    config="DeepseekV2Config",
    block="DeepseekV2Moe",
    names=("moe_intermediate_size", "n_routed_experts"),
    layout=GATE | EXPERTS | shared("shared_experts"),
    theirs={
        "num_attention_heads": 4,  # its config wants a divisor of H
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "routed_scaling_factor": 16.0,
    },
    ours={
        "renormalize": False,
        "num_expert_group": 4,
        "topk_group": 2,
        "num_shared_experts": 2,
        "routed_scaling_factor": 16.0,
    },
)
DEEPSEEK_V3 = Family(
    model="deepseek_v3",
    config="DeepseekV3Config",
    block="DeepseekV3MoE",
    names=("moe_intermediate_size", "n_routed_experts"),
    layout=GATE | SELECTION_BIAS | EXPERTS | shared("shared_experts"),
    theirs={"n_group": 4, "topk_group": 2, "n_shared_experts": 1, "routed_scaling_factor": 2.5},
    ours={
        "scoring_func": "sigmoid",
        "expert_bias": True,
        "num_expert_group": 4,
        "topk_group": 2,
        "group_score": "top2_sum",
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.5,
    },
)
GLM45 = Family(
    model="glm4_moe",
    config="Glm4MoeConfig",
    block="Glm4MoeMoE",
    names=("moe_intermediate_size", "n_routed_experts"),
    layout=GATE | SELECTION_BIAS | EXPERTS | shared("shared_experts"),
    theirs={"n_shared_experts": 1},
    ours={"scoring_func": "sigmoid", "expert_bias": True, "num_shared_experts": 1},
)
GPT_OSS = Family(
    model="gpt_oss",
    config="GptOssConfig",
    block="GptOssMLP",
    names=("intermediate_size", "num_local_experts"),
    layout={
        "router.weight": same("router.weight"),
        "router.bias": same("router.bias"),
        "experts.w_gate_up": lambda theirs: interleaved("experts.gate_up_proj")(theirs).mT,
        "experts.b_gate_up": interleaved("experts.gate_up_proj_bias"),
        "experts.w_down": transposed("experts.down_proj"),
        "experts.b_down": same("experts.down_proj_bias"),
    },
    theirs={},
    ours={"activation": "swiglu_clamped", "mlp_bias": True, "router_bias": True},
)
LLAMA4 = Family(
    model="llama4",
    config="Llama4TextConfig",
    block="Llama4TextMoe",
    names=("intermediate_size", "num_local_experts"),
    layout={"router.weight": same("router.weight")} | EXPERTS_IN_OUT | shared("shared_expert"),
    theirs={},
    ours={
        "top_k": 1,
        "scoring_func": "sigmoid",
        "renormalize": False,
        "gate_on": "input",
        "num_shared_experts": 1,
    },
)
# Two more, as independent oracles of what the nine leave out: ReLU^2 without a gate half, and
# sqrt(softplus) scores.
NEMOTRON_H = Family(
    model="nemotron_h",
    config="NemotronHConfig",
    block="NemotronHMoE",
    names=("moe_intermediate_size", "n_routed_experts"),
    layout=GATE
    | SELECTION_BIAS
    | {
        "experts.w_gate_up": same("experts.up_proj"),
        "experts.w_down": same("experts.down_proj"),
        "shared_experts.w_gate_up": same("shared_experts.up_proj.weight"),
        "shared_experts.w_down": same("shared_experts.down_proj.weight"),
    },
    theirs={"moe_shared_expert_intermediate_size": 20, "moe_latent_size": None},
    ours={
        "scoring_func": "sigmoid",
        "expert_bias": True,
        "activation": "relu2",
        "num_shared_experts": 1,
        "shared_intermediate_size": 20,
    },
)
DEEPSEEK_V4 = Family(
    model="deepseek_v4",
    config="DeepseekV4Config",
    block="DeepseekV4SparseMoeBlock",
    names=("moe_intermediate_size", "n_routed_experts"),
    layout=GATE | SELECTION_BIAS | EXPERTS | shared("shared_experts"),
    # Its clamped SwiGLU is not among our activations: the limit is out of reach here.
    theirs={"mlp_layer_types": ["moe"], "num_hidden_layers": 1, "swiglu_limit": 1e9},
    ours={
        "scoring_func": "sqrtsoftplus",
        "expert_bias": True,
        "num_shared_experts": 1,
        "routed_scaling_factor": 1.5,
    },
    build={"layer_idx": 0},
)


def variant(
    family: Family, theirs: dict[str, Any] | None = None, ours: dict[str, Any] | None = None
) -> Family:
    return family._replace(theirs=family.theirs | (theirs or {}), ours=family.ours | (ours or {}))


FAMILIES = {
    "Mixtral": MIXTRAL,
    "Mixtral with GELU": variant(MIXTRAL, {"hidden_act": "gelu"}, {"activation": "geglu"}),
    "Qwen2-MoE": QWEN2,
    "Qwen3-MoE": QWEN3,
    "Qwen3-MoE, not renormalised": variant(
        QWEN3, {"norm_topk_prob": False}, {"renormalize": False}
    ),
    "OLMoE": OLMOE,
    "DeepSeek-V2": DEEPSEEK_V2,
    "DeepSeek-V2, greedy": variant(
        DEEPSEEK_V2, {"topk_method": "greedy"}, {"num_expert_group": 1, "topk_group": 1}
    ),
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-V3, one group": variant(
        DEEPSEEK_V3, {"n_group": 1, "topk_group": 1}, {"num_expert_group": 1, "topk_group": 1}
    ),
    "DeepSeek-V3, not renormalised": variant(
        DEEPSEEK_V3, {"norm_topk_prob": False}, {"renormalize": False}
    ),
    "GLM-4.5": GLM45,
    "GPT-OSS": GPT_OSS,
    "Llama-4": LLAMA4,
    "Llama-4 with two choices": variant(LLAMA4, ours={"top_k": 2}),
    "Nemotron-H": NEMOTRON_H,
    "DeepSeek-V4": DEEPSEEK_V4,
}
