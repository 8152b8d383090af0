"""The search for tiles, and the tables that it leaves."""

import itertools
import json
import time

import pytest
import torch

from ep_moe import ConfigError, MoEConfig, tune
from ep_moe.kernels import choice
from ep_moe.kernels.choice import Product, default_tile, tile_for
from ep_moe.kernels.tiles import Tile

CPU = torch.device("cpu")
SMALL = Tile(16, 16, 16, warps=4, stages=2)
PRODUCT = Product("product", 2, 1024, 768, 2048)


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    """What was read for one test is not read again for the next."""
    monkeypatch.delenv("EP_MOE_TILES", raising=False)
    choice._nearest.cache_clear()
    choice._table.cache_clear()
    yield
    choice._nearest.cache_clear()
    choice._table.cache_clear()


def test_every_product_of_a_layer_is_run_with_what_it_is_named_for(monkeypatch):
    """The product that a tile is stored under is the one that the ops ask for it by."""
    config = MoEConfig(hidden_size=32, intermediate_size=24, num_experts=4, top_k=2)
    flow = tune.operands(config, 16, 1, torch.float32, CPU)
    tuned = [product for product, _ in tune.launches(flow, "swiglu", training=True)]
    assert [product.form for product in tuned] == [
        "hidden",
        "product",
        "gradient",
        "dgrad",
        "wgrad",
        "wgrad",
    ]
    asked = []
    monkeypatch.setattr(choice, "tile_for", lambda p, arch, exact: asked.append(p) or SMALL)
    from ep_moe import ops
    from tests.kernels.test_experts import use_kernels

    use_kernels(monkeypatch)
    out = ops.hidden(
        flow.rows, flow.w_gate_up, flow.packed, None, gates=None, activation="swiglu", keep=True
    )
    offsets, index = flow.packed.offsets, {"arrived_of_packed": flow.packed.arrived_of_packed}
    ops.grouped_gemm(out.h, flow.w_down, offsets)
    grads = ops.hidden_backward(
        flow.d_out, flow.w_down, flow.packed, out.pre, None, gates=flow.gates, activation="swiglu"
    )
    ops.grouped_gemm_dgrad(grads.pre, flow.w_gate_up, offsets)
    ops.grouped_gemm_wgrad(grads.pre, flow.rows, offsets, gathered="x", **index)
    ops.grouped_gemm_wgrad(flow.d_out, grads.weighted_h, offsets, gathered="d_y", **index)
    assert asked == tuned


def test_one_of_several_ranks_has_its_share_of_experts_and_no_more_choices(monkeypatch):
    config = MoEConfig(hidden_size=8, intermediate_size=4, num_experts=4, top_k=3)
    flow = tune.operands(config, 6, 2, torch.float32, CPU)
    assert flow.packed.packed_of_arrived.shape == (6, 2)
    assert flow.w_down.shape == (2, 8, 4)
    kept = []
    monkeypatch.setattr(tune, "hidden", lambda *_, keep, **options: kept.append(keep))
    for training in (True, False):
        _, launch = next(tune.launches(flow, "swiglu", training=training))
        launch(SMALL)
    assert kept == [True, False]


def test_the_fastest_shape_is_timed_again_with_its_variants(monkeypatch):
    timed = []

    def best(product, launch, tiles, device):
        timed.append(tiles)
        return tune.Timed(product, tiles[-1], 1.0)

    monkeypatch.setattr(tune, "_best", best)
    first = tune.shapes(PRODUCT, "interpreter")
    found = tune.fastest(PRODUCT, lambda tile: None, CPU)
    then = [first[-1], *tune.variants(first[-1], PRODUCT)]
    assert timed == [first, then]
    assert found.tile == then[-1]


def test_a_layer_is_tuned_from_start_to_end(monkeypatch):
    monkeypatch.setattr(tune, "shapes", lambda product, arch: [SMALL, SMALL._replace(block_k=32)])
    monkeypatch.setattr(tune, "ROUND_MS", 0.0)
    monkeypatch.setattr(tune, "ROUNDS", 1)
    config = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2)
    options = {"tokens": 8, "ranks": 2, "dtype": torch.float32, "device": CPU}
    found = list(tune.tune(config, **options))
    assert len(found) == 6
    assert {timed.product.rows for timed in found} == {8}  # 8 tokens, 2 choices, 2 experts here
    assert len(list(tune.tune(config, training=False, **options))) == 2


def test_the_fastest_wins_and_what_the_gpu_cannot_hold_is_passed_over(monkeypatch):
    from triton.runtime.errors import OutOfResources

    slow, fast, big = (SMALL._replace(block_k=k) for k in (32, 64, 128))

    def launch(tile):
        if tile.block_k == 128:
            raise OutOfResources(1, 0, "shared memory")
        time.sleep(0.001 if tile.block_k == 64 and tile.group_m == 4 else 0.005)

    monkeypatch.setattr(tune, "shapes", lambda product, arch: [slow, fast, big])
    monkeypatch.setattr(tune, "ROUND_MS", 1.0)
    best = tune._best(PRODUCT, launch, [slow, fast, fast._replace(group_m=4), big], CPU)
    assert best.tile == fast._replace(group_m=4)
    with pytest.raises(RuntimeError, match="no tile runs for"):
        tune._best(PRODUCT, launch, [big], CPU)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_candidates_begin_with_the_default_and_suit_their_product(arch):
    def of(form, rows=1024):
        product = PRODUCT._replace(form=form, rows=rows)
        first, *others = tune.shapes(product, arch)
        assert first == default_tile(product, arch)
        assert {tile.tma for tile in others} == {arch != "sm_80"}
        assert arch == "sm_90" or not any(tile.specialize for tile in others)
        return others

    for rows in (1, 1024):
        read = {2 * tile.block_n for tile in of("hidden", rows)}
        assert read == {tile.block_n for tile in of("product", rows)}
        through = of("gradient", rows)
        assert {tile.step for tile in through} == {0, Tile(0, 0, 0, 0, 0).step}
        assert max(tile.block_m * tile.block_n // tile.warps for tile in through) <= 4096


def test_variants_never_flatten_a_weight_gradient():
    """Its loop may have no round at all, and zeros to store all the same."""
    for tile in (SMALL, default_tile(PRODUCT, "sm_90")):
        found = tune.variants(tile, PRODUCT._replace(form="wgrad"))
        assert not any(variant.flatten or variant.swap for variant in found)
        assert any(variant.flatten for variant in tune.variants(tile, PRODUCT))


def table(tmp_path, *entries):
    path = tmp_path / "tiles.json"
    tune.merge(path, [tune.Timed(product, tile, 1.0) for product, tile in entries])
    return path


def test_a_table_is_extended_and_its_entries_replaced(tmp_path):
    other = PRODUCT._replace(rows=16)
    path = table(tmp_path, (PRODUCT, SMALL), (other, SMALL))
    table(tmp_path, (PRODUCT, SMALL._replace(stages=4)))
    read = dict(choice.read_table(path.read_text(), str(path)))
    assert read == {PRODUCT: SMALL._replace(stages=4), other: SMALL}


def test_the_nearest_product_of_the_same_form_lends_its_tile(tmp_path, monkeypatch):
    few, many = SMALL, SMALL._replace(stages=4)
    path = table(tmp_path, (PRODUCT._replace(rows=8), few), (PRODUCT, many))
    monkeypatch.setenv("EP_MOE_TILES", str(path))
    for rows, expected in [(1, few), (16, few), (500, many), (100_000, many), (0, few)]:
        assert tile_for(PRODUCT._replace(rows=rows), "sm_90") == expected
    between = [PRODUCT._replace(rows=rows) for rows in (32, 100, 250)]
    for other in (PRODUCT._replace(form="dgrad"), PRODUCT._replace(itemsize=4), *between):
        assert tile_for(other, "sm_90") == default_tile(other, "sm_90")


def test_a_tile_for_descriptors_does_not_serve_what_has_none(tmp_path, monkeypatch):
    path = table(tmp_path, (PRODUCT, SMALL._replace(tma=True)))
    monkeypatch.setenv("EP_MOE_TILES", str(path))
    assert tile_for(PRODUCT, "sm_90").tma
    for odd in (PRODUCT._replace(depth=1411), PRODUCT._replace(columns=2050)):
        assert tile_for(odd, "sm_90") == default_tile(odd, "sm_90")
        assert not tile_for(odd, "sm_90").tma


def test_exact_takes_one_tile_whatever_the_number_of_rows_and_the_table(tmp_path, monkeypatch):
    path = table(tmp_path, (PRODUCT._replace(rows=8), SMALL), (PRODUCT, SMALL._replace(stages=4)))
    monkeypatch.setenv("EP_MOE_TILES", str(path))
    for arch, form in itertools.product(("sm_90", "sm_80", "interpreter"), ("product", "hidden")):
        tiles = {
            tile_for(Product(form, 2, rows, 768, 2048), arch, exact=True)
            for rows in (0, 1, 8, 16, 17, 1024, 4096)
        }
        assert len(tiles) == 1
        assert not tiles & {SMALL, SMALL._replace(stages=4)}


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "{}x",
        '[{"tile": {}}]',
        json.dumps([{"product": PRODUCT._asdict(), "tile": {"block_m": 16}}]),
        json.dumps([{"product": {"form": "product"}, "tile": SMALL._asdict()}]),
    ],
)
def test_a_file_that_is_no_table_is_refused(text, tmp_path, monkeypatch):
    path = tmp_path / "tiles.json"
    path.write_text(text)
    monkeypatch.setenv("EP_MOE_TILES", str(path))
    with pytest.raises(ConfigError, match=r"EP_MOE_TILES.*ep-moe tune"):
        tile_for(PRODUCT, "sm_90")


def test_a_table_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("EP_MOE_TILES", str(tmp_path / "nowhere.json"))
    with pytest.raises(ConfigError, match=r"EP_MOE_TILES.*nowhere.*ep-moe tune"):
        tile_for(PRODUCT, "sm_90")


def test_without_a_gpu_the_command_says_so(monkeypatch):
    """As the README calls it."""
    from ep_moe import cli

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"ep-moe: .* GPU"):
        cli.main(["tune", "configs/tiny.yaml", "--tokens", "[8, 16]", "--ranks", "2"])
