"""A bad config is refused when it is built, by the name of the field; a good one means what it
says."""

import copy
import pickle
import warnings
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from ep_moe import ConfigError, MoEConfig, MoELayer, SelectionConfig, errors
from ep_moe.config import ALIASES, parse_args
from tests.helpers import small_config

CONFIGS = sorted((Path(__file__).parent.parent / "configs").rglob("*.yaml"))
NAN, INF = float("nan"), float("inf")

BAD = [  # field, what is wrong with it
    ("hidden_size", {"hidden_size": 0}),
    ("hidden_size", {"hidden_size": 16.0}),
    ("intermediate_size", {"intermediate_size": -1}),
    ("intermediate_size", {"intermediate_size": "12"}),
    ("num_experts", {"num_experts": 0, "top_k": 1}),
    ("num_experts", {"num_experts": True, "top_k": 1}),
    ("top_k", {"top_k": 0}),
    ("top_k", {"top_k": 9}),
    ("top_k", {"top_k": None}),
    ("num_expert_group", {"num_expert_group": 0}),
    ("num_experts", {"num_expert_group": 3}),
    ("topk_group", {"topk_group": 2}),
    ("topk_group", {"num_expert_group": 4, "topk_group": 0}),
    ("top_k", {"num_expert_group": 4, "topk_group": 1, "top_k": 3}),
    ("scoring_func", {"scoring_func": "relu"}),
    ("group_score", {"group_score": "mean"}),
    ("nan_policy", {"nan_policy": "raise"}),
    ("renormalize", {"renormalize": 1}),
    ("renormalize", {"renormalize": "yes"}),
    ("routed_scaling_factor", {"routed_scaling_factor": NAN}),
    ("routed_scaling_factor", {"routed_scaling_factor": "2.5"}),
    ("num_shared_experts", {"num_shared_experts": -1}),
    ("shared_intermediate_size", {"shared_intermediate_size": 8}),
    ("shared_intermediate_size", {"num_shared_experts": 1, "shared_intermediate_size": 0}),
    ("activation", {"activation": "gelu"}),
    ("mlp_bias", {"mlp_bias": None}),
    ("temperature", {"temperature": 0.0}),
    ("temperature", {"temperature": INF}),
    ("aux_loss_coef", {"aux_loss_coef": -0.1}),
    ("aux_loss_coef", {"aux_loss_coef": "1e-3"}),  # what YAML makes of 1e-3
    ("z_loss_coef", {"z_loss_coef": INF}),
    ("forced_routing", {"forced_routing": "random"}),
    ("forced_skew", {"forced_skew": 0.5}),
    ("forced_skew", {"forced_skew": 4.5}),  # num_experts / top_k = 4
    ("loss_reduction", {"loss_reduction": "max"}),
    ("pipeline_chunks", {"pipeline_chunks": 0}),
    ("pipeline_chunks", {"pipeline_chunks": 2, "numerics": "exact"}),
    # What would do nothing:
    ("capacity_policy", {"capacity_policy": "reroute"}),
    ("min_capacity", {"min_capacity": 4}),
    ("renormalize_after_drop", {"renormalize_after_drop": True}),
    ("aux_loss_scope", {"aux_loss_scope": "global"}),
    ("aux_loss_scope", {"aux_loss_scope": "sequence", "z_loss_coef": 0.1}),
    ("forced_skew", {"forced_skew": 2.0}),
    ("forced_skew", {"forced_skew": 2.0, "forced_routing": "balanced"}),
]

# Each field with the switch that the error names.
IDLE = [
    ({"capacity_policy": "reroute", "min_capacity": 4}, {"capacity_factor": 1.5}),
    ({"renormalize_after_drop": True}, {"capacity_factor": 1.5}),
    ({"aux_loss_scope": "global"}, {"aux_loss_coef": 0.01}),
    ({"forced_skew": 2.0}, {"forced_routing": "skewed"}),
]


@pytest.mark.parametrize("name,changes", BAD)
def test_bad_values_are_refused_by_name(name, changes):
    with pytest.raises(ConfigError, match=f"^{name} = .*, but it must be"):
        small_config(**changes)


@pytest.mark.parametrize("changes,switch", IDLE)
def test_what_does_nothing_is_refused_by_the_name_of_its_switch(changes, switch):
    small_config(**changes, **switch)
    (name,) = switch
    with pytest.raises(ConfigError, match=f"it must be .* {name}"):
        small_config(**changes)


WAYS = {  # each makes a config in a line of this file
    "constructor": lambda values, path: MoEConfig(**values),
    "from_dict": lambda values, path: MoEConfig.from_dict(values),
    "from_yaml": lambda values, path: MoEConfig.from_yaml(path),
    "replace": lambda values, path: replace(small_config(), **values),
    "command line": lambda values, path: parse_args(MoEConfig, ["--config", path]),
    "in another": lambda values, path: parse_args(Run, ["--moe", path]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("changes", [{"top_k": 1}, {"capacity_factor": 1.0}])
def test_a_warning_points_at_the_line_that_made_the_config(way, changes, tmp_path):
    values = vars(small_config()) | changes
    path = tmp_path / "layer.yaml"
    path.write_text(yaml.safe_dump(values))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        WAYS[way](values, str(path))
    assert caught
    for warning in caught:
        assert next(iter(changes)) in str(warning.message)
        assert warning.filename == __file__
        assert warning.lineno == WAYS[way].__code__.co_firstlineno


def test_a_warning_of_a_selection_points_at_its_line():
    with pytest.warns(UserWarning, match="capacity_factor") as caught:
        SelectionConfig(top_k=2, capacity_factor=1.0)
    assert [w.filename for w in caught] == [__file__]


def test_an_unknown_transport_is_refused_when_the_layer_is_built():
    with pytest.raises(ConfigError, match="one of auto, local, collective"):
        MoELayer(small_config(transport="pigeon"))


@pytest.mark.parametrize(
    "num_experts,groups,kept,top_k,valid",
    [
        (8, 4, 1, 2, True),
        (8, 2, 2, 8, True),
        (8, 8, 1, 2, False),
        (6, 4, 2, 2, False),
        (8, 4, 5, 2, False),
        (8, 4, 1, 3, False),
        (8, 1, 1, 9, False),
        (8, 0, 1, 2, False),
        (8, 4, 0, 2, False),
        (8, 1, 1, 0, False),
    ],
)
def test_routing_topologies(num_experts, groups, kept, top_k, valid):
    """Case BB-05. A valid one runs, too."""

    def build():
        return small_config(
            num_experts=num_experts, num_expert_group=groups, topk_group=kept, top_k=top_k
        )

    if valid:
        y, _ = MoELayer(build())(torch.randn(3, 16))
        assert y.isfinite().all()
    else:
        with pytest.raises(ConfigError):
            build()


def test_defaults_are_plain_top_k():
    """No model is group-limited by accident, and nothing is optional by surprise."""
    config = small_config()
    assert (config.num_expert_group, config.topk_group, config.group_score) == (1, 1, "max")
    required = {"hidden_size", "intermediate_size", "num_experts", "top_k"}
    assert set(vars(config)) - required == {
        f.name for f in fields(MoEConfig) if f.name not in required
    }
    with pytest.raises(TypeError):
        MoEConfig(16, 12, 8, 2)


@pytest.mark.parametrize("config", [small_config(), SelectionConfig(top_k=2)])
def test_a_config_is_a_value(config):
    with pytest.raises(FrozenInstanceError):
        config.top_k = 3
    for twin in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), replace(config)):
        assert twin == config
        assert hash(twin) == hash(config)
    assert replace(config, top_k=1) != config
    with pytest.raises(ConfigError, match="top_k"):
        replace(config, top_k=0)


@pytest.mark.parametrize("alias,ours", ALIASES.items())
def test_aliases(alias, ours):
    values = vars(small_config(num_shared_experts=1, num_expert_group=1, renormalize=False))
    renamed = {alias if name == ours else name: value for name, value in values.items()}
    assert alias in renamed
    assert MoEConfig.from_dict(renamed) == MoEConfig.from_dict(values)
    with pytest.raises(ConfigError, match=f"{ours} is given too"):
        MoEConfig.from_dict(values | {alias: values[ours]})


@pytest.mark.parametrize(
    "unknown,hint",
    [
        ("hiden_size", "hidden_size"),
        ("top_kk", "top_k"),
        ("num_expert", "num_experts"),
        ("topk_groups", "topk_group"),
        ("n_routed_expert", "num_experts"),
        ("colour", None),
    ],
)
def test_unknown_names_get_a_hint(unknown, hint):
    with pytest.raises(ConfigError, match=f"^{unknown} = 3") as caught:
        MoEConfig.from_dict(vars(small_config()) | {unknown: 3})
    assert ("Did you mean" in str(caught.value)) == (hint is not None)
    assert hint is None or f"Did you mean {hint}?" in str(caught.value)


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "num_experts", "top_k"])
def test_sizes_have_no_default(name):
    values = {k: v for k, v in vars(small_config()).items() if k != name}
    with pytest.raises(ConfigError, match=name):
        MoEConfig.from_dict(values)


def test_yaml_that_is_no_mapping_is_refused(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n- 2\n")
    with pytest.raises(ConfigError, match="mapping"):
        MoEConfig.from_yaml(path)


def shipped(path):
    """A file holds one layer, or a run with a layer in it."""
    values = yaml.safe_load(path.read_text())
    return MoEConfig.from_dict(values["model"]["moe"] if "model" in values else values)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configs_load_and_count_right(path):
    config = shipped(path)
    with torch.device("meta"):
        layer = MoELayer(config)
    assert sum(p.numel() for p in layer.parameters()) == config.parameters().total
    if "model" not in path.read_text():
        assert MoEConfig.from_yaml(path) == config


def test_the_models_that_the_readme_names_are_shipped():
    expected = {"tiny", "mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3", "olmoe", "gpt_oss_120b"}
    assert expected | {"glm45_air"} <= {path.stem for path in CONFIGS}


PARTS = {  # changes -> parameters of H=16, I=12, E=8, K=2: all, and those that one token meets
    (): (8 * 3 * 16 * 12 + 8 * 16, 2 * 3 * 16 * 12 + 8 * 16),
    ("mlp_bias",): (8 * (3 * 16 * 12 + 24 + 16) + 8 * 16, 2 * (3 * 16 * 12 + 24 + 16) + 8 * 16),
    ("router_bias", "learn_temperature", "expert_bias"): (
        8 * 3 * 16 * 12 + 8 * 16 + 8 + 1,
        2 * 3 * 16 * 12 + 8 * 16 + 8 + 1,
    ),
}


@pytest.mark.parametrize("switches,expected", PARTS.items())
def test_parameter_counts(switches, expected):
    config = small_config(**dict.fromkeys(switches, True))
    assert config.parameters() == expected
    assert sum(p.numel() for p in MoELayer(config).parameters()) == expected[0]


@pytest.mark.parametrize(
    "changes,width",
    [
        ({"num_shared_experts": 2}, 24),
        ({"num_shared_experts": 2, "shared_intermediate_size": 7}, 7),
    ],
)
def test_shared_experts_are_in_both_counts(changes, width):
    config, without = small_config(**changes), small_config()
    more = 3 * 16 * width
    assert config.parameters().total == without.parameters().total + more
    assert config.parameters().activated == without.parameters().activated + more
    assert sum(p.numel() for p in MoELayer(config).parameters()) == config.parameters().total


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer.

    Args:
        lr: learning rate
    """

    lr: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run with a layer in it.

    Args:
        moe: the layer
        steps: how many
        optimizer: how to step
    """

    moe: MoEConfig
    steps: int = 10
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@pytest.fixture
def run_yaml(tmp_path):
    path = tmp_path / "run.yaml"
    layer = {"d_hidden": 16, "intermediate_size": 12, "num_experts": 8, "topk": 2}
    path.write_text(yaml.safe_dump({"moe": layer, "steps": 5}))
    return str(path)


def test_command_line_overrides_the_file(run_yaml):
    argv = ["--config", run_yaml, "--moe.top_k=4", "--moe.n_routed_experts", "16"]
    run = parse_args(Run, [*argv, "--optimizer.lr", "1e-3"])
    assert run.moe == small_config(top_k=4, num_experts=16)
    assert (run.steps, run.optimizer.lr) == (5, 1e-3)


def test_later_arguments_win(run_yaml):
    argv = ["--config", run_yaml, "--moe.topk=4", "--moe.top_k=1", "--steps=7"]
    run = parse_args(Run, argv)
    assert (run.moe.top_k, run.steps) == (1, 7)


def test_a_layer_may_come_from_a_file_of_its_own(tmp_path):
    path = tmp_path / "layer.yaml"
    path.write_text("hidden_size: 16\nmoe_intermediate_size: 12\nnum_local_experts: 8\ntop_k: 2\n")
    assert parse_args(Run, ["--moe", str(path), "--moe.mlp_bias=true"]) == Run(
        moe=small_config(mlp_bias=True)
    )


@pytest.mark.parametrize(
    "argument,message",
    [
        ("--moe.top_k=many", "top_k"),
        ("--moe.top_k=2.5", "top_k"),
        ("--moe.scoring_func=relu", "scoring_func"),
        ("--moe.top_k=0", "top_k = 0, but it must be at least 1"),
        ("--moe.topk=99", "top_k = 99, but it must be at most 8"),
        ("--moe.hiden_size=3", "Did you mean moe.hidden_size?"),
        ("--stepz=3", "Did you mean steps?"),
        ("--colour=3", "colour"),
        ("--optimizer.learning_rate=3", "learning_rate"),
    ],
)
def test_a_bad_command_line_ends_in_one_named_line(run_yaml, argument, message):
    with pytest.raises(SystemExit) as caught:
        parse_args(Run, ["--config", run_yaml, argument])
    text = str(caught.value.code)
    assert message in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    "line,message",
    [("steps: many", "steps"), ("colour: 3", "colour"), ("moe: {top_k: 3}", "moe")],
)
def test_a_bad_file_ends_in_one_named_line(tmp_path, line, message):
    path = tmp_path / "bad.yaml"
    path.write_text(line)
    with pytest.raises(SystemExit) as caught:
        parse_args(Run, ["--config", str(path)])
    assert message in str(caught.value.code)


def test_errors_can_be_pickled():
    """Or a process pool that meets one hangs."""
    made = {
        "ConfigError": ("top_k", 9, "at most 8"),
        "InputError": ("x", torch.int8, "a float"),
        "PeerLost": partial(errors.PeerLost, 0, 1, stage="the counts", why="has ended"),
        "DispatchTimeout": partial(errors.DispatchTimeout, 0, 1, stage="the counts", why="waited"),
        "SplitMismatch": ([(0, 1, 2, 3)], "rows out"),
    }
    for name, kind in vars(errors).items():
        if not isinstance(kind, type) or name.startswith("_"):
            continue
        arguments = made.get(name, ("what happened",))
        error = arguments() if callable(arguments) else kind(*arguments)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
        assert vars(again) == vars(error)
