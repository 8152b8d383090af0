"""The `ep-moe` command."""

import sys
from pathlib import Path
from typing import Literal

from ep_moe.config import MoEConfig
from ep_moe.errors import BackendUnavailable, ConfigError


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


def tune(
    layer: str,
    tokens: tuple[int, ...] = (4096,),
    ranks: int = 1,
    training: bool = True,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    out: str | None = None,
) -> str:
    """Find the fastest tiles of a layer's grouped products on this GPU.

    Args:
        layer: a layer's YAML file, such as configs/deepseek_v3.yaml
        tokens: tokens of a rank; one search for each
        ranks: that share the experts
        training: also the products of the backward
        dtype: of rows and weights
        out: the table to write or extend; by default tiles_<architecture>.json
    """
    import torch

    from ep_moe import tune as tuning
    from ep_moe.kernels.device import architecture

    if not torch.cuda.is_available():
        raise BackendUnavailable("ep-moe tune times kernels on a GPU, and there is none here")
    device = torch.device("cuda", torch.cuda.current_device())
    path = Path(out or f"tiles_{architecture(device)}.json")
    config, kind = MoEConfig.from_yaml(layer), getattr(torch, dtype)
    for count in tokens:
        for timed in tuning.tune(
            config, tokens=count, ranks=ranks, training=training, dtype=kind, device=device
        ):
            print(f"{timed.ms:9.4f} ms  {timed.product}  {timed.tile}", flush=True)
            tuning.merge(path, [timed])
    return f"wrote {path}: EP_MOE_TILES={path} makes a program use it"


def doctor(ranks: int | None = None, json: bool = False) -> str:
    """What each transport needs, what of it this machine has, and which one `auto` would take.

    Args:
        ranks: that share the experts; by default one for each GPU, and at least one
        json: print that, for programs
    """
    from ep_moe import doctor as doctors
    from ep_moe.host import Host

    host = Host.look()
    diagnosis = doctors.diagnose(host, max(1, len(host.gpus)) if ranks is None else ranks)
    return doctors.as_json(diagnosis) if json else doctors.text(diagnosis)


def main(argv: list[str] | None = None) -> None:
    from jsonargparse import auto_cli

    commands = {"params": params, "tune": tune, "doctor": doctor}
    try:
        print(auto_cli(commands, args=_said(sys.argv[1:] if argv is None else argv), prog="ep-moe"))
    except (BackendUnavailable, ConfigError) as error:
        raise SystemExit(f"ep-moe: {error}") from None


def _said(argv: list[str]) -> list[str]:
    """`--json` without a value means true; to jsonargparse it is a value that is missing."""
    following = [*argv[1:], ""][: len(argv)]
    return [
        "--json=true" if word == "--json" and after not in ("true", "false") else word
        for word, after in zip(argv, following, strict=True)
    ]
