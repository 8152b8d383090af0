"""The `ep-moe` command."""

from ep_moe.config import MoEConfig


def params(layer: str) -> str:
    """Parameters of one layer, all and activated per token.

    Args:
        layer: a layer's YAML file, such as configs/deepseek_v3.yaml
    """
    config = MoEConfig.from_yaml(layer)
    total, activated = config.parameters()
    return (
        f"{layer}: {total / 1e6:,.1f} M parameters a layer, {activated / 1e6:,.1f} M of them "
        f"activated per token ({activated / total:.1%}): router, {config.top_k} of "
        f"{config.num_experts} experts, {config.num_shared_experts} shared"
    )


def main() -> None:
    from jsonargparse import auto_cli

    print(auto_cli({"params": params}, prog="ep-moe"))
