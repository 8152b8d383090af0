"""What a layer is: frozen, validated, read from YAML and the command line.

Where it runs (groups, devices) is never in here: that is `ep_moe.parallel`. Every rule is checked
when a config is built, so a bad topology never reaches a kernel.
"""

import difflib
import math
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

import yaml

from ep_moe.errors import ConfigError

# Other software's names for the same things. The right-hand side is ours.
ALIASES = {
    "topk": "top_k",
    "num_experts_per_tok": "top_k",
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts",
    "d_hidden": "hidden_size",
    "d_expert": "intermediate_size",
    "moe_intermediate_size": "intermediate_size",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "renormalize",
}


class ParameterCount(NamedTuple):
    """Parameters of one layer: all of them, and those that one token meets (router, top_k experts,
    shared experts)."""

    total: int
    activated: int


@dataclass(frozen=True)
class _Typed:
    """Reads what its fields may hold from their annotations, when a class is made and not when a
    config is: `grouped_topk` makes one in code that torch.compile traces, which reads no
    annotations."""

    _choices: ClassVar[dict[str, tuple[Any, ...]]]  # values that are accepted
    _types: ClassVar[dict[str, tuple[tuple[type, ...], str]]]  # types that are, and their name

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._choices, cls._types = {}, {}
        for name, hint in get_type_hints(cls).items():
            if get_origin(hint) is Literal:
                cls._choices[name] = get_args(hint)
            elif get_origin(hint) is not ClassVar:
                accepted = get_args(hint) or (hint,)  # `int | None` -> (int, NoneType)
                accepted = (*accepted, int) if float in accepted else accepted
                cls._types[name] = accepted, getattr(hint, "__name__", str(hint))

    def _check_types(self) -> None:
        """A config may come from YAML, where 1e-3 is a string and yes is a bool."""
        for name, choices in self._choices.items():
            value, rule = getattr(self, name), "one of " + ", ".join(map(repr, choices))
            _require(value in choices, name, value, rule)
        for name, (accepted, spelt) in self._types.items():
            value = getattr(self, name)
            matches = isinstance(value, accepted)
            matches = matches and (bool in accepted or not isinstance(value, bool))
            _require(matches, name, value, f"of type {spelt}")


@dataclass(frozen=True, kw_only=True)
class SelectionConfig(_Typed):
    """How logits become ids and gate weights.

    Args:
        top_k: experts that each token goes to (K)
        scoring_func: softmax over all experts, or of each a sigmoid or the root of its softplus
        renormalize: divide the K weights by their sum
        num_expert_group: consecutive experts form this many groups; 1 = plain top-k
        topk_group: groups that a token may choose from
        group_score: a group counts as its best expert, or as the sum of its two best
        routed_scaling_factor: multiplies the weights last
        nan_policy: rows whose logits hold NaN or +inf, or only -inf: let NaN weights through, or
            treat all logits as equal
        capacity_factor: an expert takes ceil(K * T / E * this) of a rank's T tokens; unset = all
            that come (dropless)
        capacity_policy: with capacity_factor, who stays: the first tokens, the most probable, or
            the first and, of the others, those that find another expert with room
        min_capacity: with capacity_factor, the least that an expert takes
        renormalize_after_drop: with capacity_factor, let a token's remaining weights sum to what
            all of them did
    """

    top_k: int
    scoring_func: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    renormalize: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    routed_scaling_factor: float = 1.0
    nan_policy: Literal["propagate", "uniform"] = "propagate"
    capacity_factor: float | None = None
    capacity_policy: Literal["position", "probability", "reroute"] = "position"
    min_capacity: int = 0
    renormalize_after_drop: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        _require(self.top_k >= 1, "top_k", self.top_k, "at least 1")
        _require(
            self.num_expert_group >= 1, "num_expert_group", self.num_expert_group, "at least 1"
        )
        rule = f"between 1 and num_expert_group = {self.num_expert_group}"
        _require(1 <= self.topk_group <= self.num_expert_group, "topk_group", self.topk_group, rule)
        _require(
            _finite(self.routed_scaling_factor),
            "routed_scaling_factor",
            self.routed_scaling_factor,
            "finite",
        )

        if self.capacity_factor is not None:
            factor = self.capacity_factor
            _require(
                _finite(factor) and factor > 0, "capacity_factor", factor, "finite and above 0"
            )
            if factor <= 1:
                _warn(
                    f"capacity_factor = {factor} leaves no room for any imbalance: tokens will be "
                    "dropped; above 1 leaves some, unset drops none"
                )
        _require(self.min_capacity >= 0, "min_capacity", self.min_capacity, "0 or more")
        if self.capacity_factor is None:
            idle = ("capacity_policy", "min_capacity", "renormalize_after_drop")
            _require_defaults(self, idle, "while capacity_factor is unset, which drops nothing")

    def check_experts(self, num_experts: int) -> None:
        """Refuse a number of experts that these rules cannot choose from."""
        groups, kept = self.num_expert_group, self.topk_group
        _require(num_experts >= 1, "num_experts", num_experts, "at least 1")
        _require(
            num_experts % groups == 0,
            "num_experts",
            num_experts,
            f"a multiple of num_expert_group = {groups}",
        )
        candidates = kept * (num_experts // groups)
        rule = (
            f"at most {candidates}, the experts in the kept topk_group = {kept} of {groups} groups"
        )
        _require(self.top_k <= candidates, "top_k", self.top_k, rule)


@dataclass(frozen=True, kw_only=True)
class MoEConfig(SelectionConfig):
    """One Mixture-of-Experts layer.

    Args:
        hidden_size: width of a token (H)
        intermediate_size: width of one expert (I)
        num_experts: routed experts over all ranks (E)
        num_shared_experts: experts that every token meets, run as one dense MLP
        shared_intermediate_size: width of that MLP; by default num_shared_experts times
            intermediate_size
        shared_expert_gate: multiply the shared experts' output by a learned sigmoid per token
        shared_expert_overlap: with transports of more than one rank the shared experts are computed
            while rows travel; turn it off where PYTORCH_CUDA_ALLOC_CONF has expandable_segments
        activation: between the two matrices of an expert; swiglu_clamped is GPT-OSS's; relu2 has no
            gate half
        gate_on: the gate weight multiplies the expert's output, or its input (Llama-4)
        mlp_bias: the expert matrices have biases
        router_bias: the router has a bias on its logits
        expert_bias: a selection-only bias per expert, kept in fp32; never in a weight, no gradient
        temperature: logits are divided by it
        learn_temperature: train it (its logarithm is the parameter)
        aux_loss_coef: alpha of the balance loss in the stats
        aux_loss_scope: balance within this rank's tokens of one call, within each sequence, or over
            all ranks (and, with `ep_moe.balance_hook`, over the accumulation steps so far)
        z_loss_coef: beta of the router z-loss in the stats
        forced_routing: for benchmarks: ignore the logits' order and spread tokens evenly, or skewed
        forced_skew: with forced_routing skewed: load of the busiest expert over the mean load
        experts_keep: what experts keep for their backward: rows and pre_activation, or rows alone
            (2 * intermediate_size numbers less for each choice, one product more)
        numerics: fast, or exact: y, dX and the experts' gradients do not depend, to the last bit,
            on the number of ranks or on the other tokens in the batch; slower, and more bytes move.
            On a CPU for one number of threads, the same in every run that is compared
            (OMP_NUM_THREADS, which torchrun sets to 1 for several ranks; torch.set_num_threads)
        transport: how rows cross ranks; auto = local for one rank, for more the fastest that can
            run, and collective without GPUs or max_tokens_per_rank
        max_tokens_per_rank: the most tokens of a rank in a call, for transports symm, deepep and
            deepep_low_latency, whose buffers have a fixed size, and for auto to try the first two
        pipeline_chunks: with transports of more than one rank a call's tokens travel in so many
            parts, each while the experts work on another. On one rank it changes nothing. Leave it
            at 1 where PYTORCH_CUDA_ALLOC_CONF has expandable_segments
        loss_reduction: mean = each rank's loss is a mean over its tokens and ranks are averaged;
            sum = they are added
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_shared_experts: int = 0
    shared_intermediate_size: int | None = None
    shared_expert_gate: bool = False
    shared_expert_overlap: bool = True
    activation: Literal["swiglu", "geglu", "relu2", "swiglu_clamped"] = "swiglu"
    gate_on: Literal["output", "input"] = "output"
    mlp_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    temperature: float = 1.0
    learn_temperature: bool = False
    aux_loss_coef: float = 0.0
    aux_loss_scope: Literal["micro_batch", "sequence", "global"] = "micro_batch"
    z_loss_coef: float = 0.0
    forced_routing: Literal["none", "balanced", "skewed"] = "none"
    forced_skew: float = 1.0
    experts_keep: Literal["pre_activation", "rows"] = "pre_activation"
    numerics: Literal["fast", "exact"] = "fast"
    transport: str = "auto"
    max_tokens_per_rank: int | None = None
    pipeline_chunks: int = 1
    loss_reduction: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("hidden_size", "intermediate_size"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        self.check_experts(self.num_experts)
        most = self.max_tokens_per_rank
        _require(most is None or most >= 1, "max_tokens_per_rank", most, "unset or at least 1")
        chunks = self.pipeline_chunks
        _require(chunks >= 1, "pipeline_chunks", chunks, "at least 1")
        if self.numerics == "exact":
            rule = (
                "1 with numerics = 'exact': the experts' gradients are there one sum over all "
                "tokens, and would be one of each part"
            )
            _require(chunks == 1, "pipeline_chunks", chunks, rule)
        _require(
            self.num_shared_experts >= 0, "num_shared_experts", self.num_shared_experts, "0 or more"
        )
        width = self.shared_intermediate_size
        if width is not None:
            _require(
                self.num_shared_experts > 0,
                "shared_intermediate_size",
                width,
                "unset when num_shared_experts = 0",
            )
            _require(width >= 1, "shared_intermediate_size", width, "at least 1")
        if self.shared_expert_gate:
            _require(
                self.num_shared_experts > 0,
                "shared_expert_gate",
                True,
                "false without shared experts",
            )
        if self.top_k == 1 and self.renormalize:
            _warn(
                "top_k = 1 with renormalize = True makes every gate weight 1: the router gets no "
                "gradient from the loss; set renormalize = False"
            )
        for name in ("aux_loss_coef", "z_loss_coef"):
            value = getattr(self, name)
            _require(_finite(value) and value >= 0, name, value, "finite and 0 or more")
        if not self.aux_loss_coef:
            rule = "while aux_loss_coef = 0: there is no loss to have a scope"
            _require_defaults(self, ("aux_loss_scope",), rule)
        _require(
            _finite(self.temperature) and self.temperature > 0,
            "temperature",
            self.temperature,
            "finite and above 0",
        )
        limit = self.num_experts / self.top_k
        rule = (
            f"between 1 and num_experts / top_k = {limit:g}: an expert takes a token once at most"
        )
        _require(1 <= self.forced_skew <= limit, "forced_skew", self.forced_skew, rule)
        if self.forced_routing != "skewed":
            _require_defaults(self, ("forced_skew",), "without forced_routing = 'skewed'")
        if self.capacity_factor is not None and self.capacity_policy == "reroute":
            _require(
                self.forced_routing == "none",
                "forced_routing",
                self.forced_routing,
                "none with capacity_policy = 'reroute', which follows the logits",
            )

    @property
    def pre_activation_size(self) -> int:
        """Rows of an expert's first matrix: gate and up halves, or up alone."""
        return self.intermediate_size * (1 if self.activation == "relu2" else 2)

    @property
    def shared_size(self) -> int:
        """Width of the shared experts' MLP; 0 = there is none."""
        return self.shared_intermediate_size or self.num_shared_experts * self.intermediate_size

    def parameters(self) -> ParameterCount:
        """Parameters of one layer, all and activated per token; shared experts are in both, buffers
        in neither."""
        h, i, first = self.hidden_size, self.intermediate_size, self.pre_activation_size
        expert = h * (first + i) + (first + h if self.mlp_bias else 0)
        shared = h * (first + i) * self.shared_size // i + (h if self.shared_expert_gate else 0)
        router = self.num_experts * (h + self.router_bias) + self.learn_temperature
        always = router + shared
        return ParameterCount(always + self.num_experts * expert, always + self.top_k * expert)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "MoEConfig":
        """Build from plain values; other software's names (`topk`, `n_routed_experts` ...) are
        accepted."""
        values = canonical_names(values)
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(
                    name, values[name], f"left out: there is no such field.{near_miss(name, known)}"
                )
        missing = [
            name
            for name in ("hidden_size", "intermediate_size", "num_experts", "top_k")
            if name not in values
        ]
        if missing:
            raise ConfigError(missing[0], None, "given: it has no default")
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | Path) -> "MoEConfig":
        """Read one layer from a YAML file such as those in `configs/`."""
        values = yaml.safe_load(Path(path).read_text())
        if not isinstance(values, dict):
            raise ConfigError(str(path), values, "a YAML mapping of field names to values")
        return cls.from_dict(values)


def canonical_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace aliases by our names, at any depth; the same field under two names is refused."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        ours = ALIASES.get(name, name)
        if ours in out:
            raise ConfigError(name, value, f"left out: {ours} is given too")
        out[ours] = canonical_names(value) if isinstance(value, Mapping) else value
    return out


def near_miss(name: str, known: Sequence[str]) -> str:
    """' Did you mean top_k?' or nothing."""
    found = difflib.get_close_matches(name, [*known, *ALIASES], n=1)
    return f" Did you mean {ALIASES.get(found[0], found[0])}?" if found else ""


def parse_args(config_class: type, argv: Sequence[str] | None = None) -> Any:
    """Read a config dataclass from `--config FILE.yaml` and dotted overrides such as
    `--moe.top_k=4`.

    A nested config may be a file as well (`--moe configs/olmoe.yaml`). Later arguments win. A wrong
    value or an unknown name (with its near miss) ends the program with one line on stderr.
    """
    from jsonargparse import ArgumentError, ArgumentParser, set_loader

    set_loader("ep_moe", _load_yaml, exceptions=(yaml.YAMLError,))
    parser = ArgumentParser(parser_mode="ep_moe", exit_on_error=False)
    parser.add_argument(
        "--config", action="config", help="a YAML file with any of the values below"
    )
    parser.add_class_arguments(config_class)
    words = [_canonical_argument(word) for word in (sys.argv[1:] if argv is None else argv)]
    try:
        values = vars(parser.instantiate(parser.parse_args(words)))
        return config_class(**{f.name: values[f.name] for f in fields(config_class)})
    except ArgumentError as error:
        found = re.search(r"option '([\w.]+)'|unrecognized arguments: --([\w.]+)", str(error))
        hint = (
            near_miss(found[1] or found[2], list(vars(parser.get_defaults().as_flat())))
            if found
            else ""
        )
        raise SystemExit(f"{parser.prog}: {error}.{hint} --help lists every argument") from None
    except ConfigError as error:
        raise SystemExit(f"{parser.prog}: {error}") from None


def _load_yaml(text: str) -> Any:
    values = yaml.safe_load(text)
    return canonical_names(values) if isinstance(values, dict) else values


def _canonical_argument(word: str) -> str:
    """--moe.topk=4 -> --moe.top_k=4"""
    name, equals, value = word.partition("=")
    if not name.startswith("--"):
        return word
    path, dot, leaf = name[2:].rpartition(".")
    return f"--{path}{dot}{ALIASES.get(leaf, leaf)}{equals}{value}"


def _require(holds: bool, field: str, got: object, rule: str) -> None:
    if not holds:
        raise ConfigError(field, got, rule)


def _require_defaults(config: SelectionConfig, names: Sequence[str], where: str) -> None:
    """Refuse a field that was set and would do nothing."""
    for f in fields(config):
        if f.name in names:
            value = getattr(config, f.name)
            _require(value == f.default, f.name, value, f"{f.default!r} {where}")


def _warn(message: str) -> None:
    """At the line that made the config: constructors, `replace` and the parser of command lines may
    stand in between."""
    frame, level, outside = sys._getframe(), 1, 1
    while frame is not None:
        if frame.f_globals.get("__name__") in (__name__, "dataclasses"):
            outside = level + 1
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=outside)


def _finite(value: float) -> bool:
    return math.isfinite(value)
