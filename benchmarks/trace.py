"""Recorded routings for the benches, and how uneven they are:

    python -m benchmarks.trace benchmarks/traces/NAME.npz

`launch/train_lm.py --record_routing.steps '[...]'` records one. MaxVio and the busiest rank's load
over the mean are of all tokens of the recorded step.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ep_moe
from ep_moe.errors import ConfigError, InputError
from ep_moe.parallel import Process
from ep_moe.routing import count_tokens
from ep_moe.traces import RoutingTrace


@dataclass(frozen=True)
class Replay:
    """One step and layer of a trace, shared out: rank r takes the r-th contiguous part."""

    name: str
    step: int
    layer: int
    routing: ep_moe.Routing
    num_experts: int

    @classmethod
    def load(
        cls, path: str | Path, moe: ep_moe.MoEConfig, *, step: int | None, layer: int | None
    ) -> "Replay":
        """By default the last step and the first layer that were recorded.

        Raises InputError for a step or layer that was not, ConfigError when `moe` cannot take the
        trace's routing as it is.
        """
        trace = RoutingTrace.load(path)
        step = trace.steps[-1] if step is None else step
        layer = trace.layers[0] if layer is None else layer
        given, recorded = (moe.num_experts, moe.top_k), (trace.num_experts, trace.top_k)
        if given != recorded:
            raise ConfigError("(moe.num_experts, moe.top_k)", given, f"{recorded}, as in {path}")
        for name, rule in {"forced_routing": "none", "capacity_factor": None}.items():
            if (value := getattr(moe, name)) != rule:
                raise ConfigError(f"moe.{name}", value, f"{rule!r} with a trace, which has decided")
        routing = trace.routing(step, layer)
        if nowhere := int((routing.ids < 0).sum()):
            got = f"the trace {path}, with {nowhere} choices that go nowhere"
            raise ConfigError("trace", got, "one without: rates count top_k choices of each token")
        return cls(Path(path).stem, step, layer, routing, moe.num_experts)

    def share(self, tokens: int, process: Process) -> ep_moe.Routing:
        """The routing of this rank's tokens, on its device. Raises ConfigError when the ranks'
        tokens are more than were recorded."""
        held, ranks = len(self.routing.ids), process.world_size
        if tokens * ranks > held:
            rule = (
                f"at most {held // ranks}: the trace holds {held} tokens for {ranks} rank(s), and "
                "none is repeated"
            )
            raise ConfigError("tokens", tokens, rule)
        mine = slice(process.rank * tokens, (process.rank + 1) * tokens)
        parts = (self.routing.ids[mine], self.routing.gate_weights[mine])
        return ep_moe.Routing(*(part.to(process.device, copy=True) for part in parts))

    def case(self, tokens: int, ranks: int) -> dict[str, Any]:
        """What a record says of the tokens that all ranks take."""
        counts = count_tokens(self.routing.ids[: tokens * ranks], self.num_experts)
        return {
            "trace": self.name,
            "trace_step": self.step,
            "trace_layer": self.layer,
            "max_vio": round(float(ep_moe.max_vio(counts)), 3),
            "busiest_rank": round(float(ep_moe.busiest_rank(counts, ranks)), 3),
        }


def table(trace: RoutingTrace) -> str:
    """Markdown: for each recorded step and layer how uneven it is."""
    ranks = [w for w in (2, 4, 8) if trace.num_experts % w == 0]
    head = ["step", "layer", "MaxVio", *(f"busiest of {w} ranks" for w in ranks)]
    rows = [head, ["---"] * len(head)]
    for step in trace.steps:
        for layer in trace.layers:
            counts = count_tokens(trace.routing(step, layer).ids, trace.num_experts)
            figures = [ep_moe.max_vio(counts), *(ep_moe.busiest_rank(counts, w) for w in ranks)]
            rows.append([str(step), str(layer), *(f"{float(f):.2f}" for f in figures)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m benchmarks.trace", description="How uneven a trace is.")
    parser.add_argument("trace", help="an npz file, such as those in benchmarks/traces")
    path = parser.parse_args(argv).trace
    try:
        trace = RoutingTrace.load(path)
    except (InputError, FileNotFoundError) as error:
        parser.error(str(error))
    experts = f"{trace.num_experts} experts, top_k {trace.top_k}"
    print(f"{experts}, {trace.tokens_per_step} tokens a step")
    print("\n".join(f"{name}: {value}" for name, value in trace.origin.items()))
    print(f"\n{table(trace)}")


if __name__ == "__main__":
    main()
