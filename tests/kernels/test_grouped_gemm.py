"""The persistent product, forward and transposed, against the loop over experts in float64."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from ep_moe import ops
from ep_moe.kernels.grouped_gemm import grouped_gemm
from ep_moe.testing import assert_close
from tests.helpers import LAYOUTS, in_layout, offsets_of
from tests.kernels.cases import SIZES, TILES, dtypes_on, one_of, tolerance

pytestmark = pytest.mark.usefixtures("poisoned_memory")

WIDTHS = [(32, 40), (17, 5), (1, 1), (24, 70)]  # N_in, N_out; 16-byte rows and others


def make(sizes, n_in, n_out, dtype, device, tail=0):
    """x, weight, bias, d_y with a tail of NaN rows that no expert owns."""
    rows, experts = sum(sizes), len(sizes)
    x, d_y = torch.randn(rows + tail, n_in), torch.randn(rows + tail, n_out)
    x[rows:], d_y[rows:] = torch.nan, torch.nan
    weight, bias = torch.randn(experts, n_out, n_in) / n_in**0.5, torch.randn(experts, n_out)
    return [value.to(device, dtype) for value in (x, weight, bias, d_y)]


def check(sizes, n_in, n_out, dtype, device, tile, *, biased, tail=3):
    x, weight, bias, d_y = make(sizes, n_in, n_out, dtype, device, tail)
    bias, offsets, rows = bias if biased else None, offsets_of(sizes, device), sum(sizes)
    wide = None if bias is None else bias.double()
    for name, got, expected in [
        (
            "y",
            grouped_gemm(x, weight, offsets, bias, tile=tile),
            ops.grouped_gemm(x.double(), weight.double(), offsets, wide),
        ),
        (
            "d_x",
            grouped_gemm(d_y, weight, offsets, transposed=True, tile=tile),
            ops.grouped_gemm_dgrad(d_y.double(), weight.double(), offsets),
        ),
    ]:
        assert got.dtype == dtype
        assert_close(got[:rows], expected[:rows], name=name, tolerance=tolerance(dtype))
        assert got[rows:].isnan().all(), f"{name}: a row that no expert owns was written"


@pytest.mark.parametrize("n_in,n_out", WIDTHS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES.keys())
def test_equals_the_loop(tile, sizes, n_in, n_out, device):
    for dtype in one_of(dtypes_on(device), tile, sizes, n_in):
        check(sizes, n_in, n_out, dtype, device, tile, biased=(n_in + len(sizes)) % 2 == 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, device):
    x, weight, bias, _ = make((3, 0, 20), 32, 24, torch.float32, device)
    offsets = offsets_of((3, 0, 20), device)
    expected = ops.grouped_gemm(x.double(), weight.double(), offsets, bias.double())
    x, bias = in_layout(x, layout), in_layout(bias, layout)
    for w in (weight, weight.mT.contiguous().mT):
        got = grouped_gemm(x, w, offsets, bias, tile=TILES["descriptors"])
        assert_close(got, expected, name="y", tolerance=tolerance(torch.float32))


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES.keys())
def test_a_nan_stays_with_its_row_and_its_expert(tile, device):
    """Tiles and descriptors read beyond an expert's rows and beyond its weight."""
    sizes = (5, 20, 3)
    x, weight, _, d_y = make(sizes, 24, 20, torch.float32, device)
    offsets = offsets_of(sizes, device)
    x[4], d_y[4], weight[2] = torch.nan, torch.nan, torch.nan
    for got in (
        grouped_gemm(x, weight, offsets, tile=tile),
        grouped_gemm(d_y, weight, offsets, transposed=True, tile=tile),
    ):
        bad = got.isnan()
        assert bad[4].all()
        assert bad[25:].all()
        assert not bad[:4].any()
        assert not bad[5:25].any()


@hypothesis.given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    n_in=st.integers(1, 40),
    n_out=st.integers(1, 40),
    tile=st.sampled_from(list(TILES.values())),
)
@hypothesis.settings(max_examples=20)
def test_any_groups_and_widths(sizes, n_in, n_out, tile):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check(tuple(sizes), n_in, n_out, torch.float32, device, tile, biased=True)


def test_a_row_does_not_depend_on_the_others(device):
    """The same bits at another place, in other company, of another number of tiles."""
    x, weight, bias, _ = make((40, 90), 32, 48, torch.float32, device)
    tile = TILES["pointers"]
    many = grouped_gemm(x, weight, offsets_of((40, 90), device), bias, tile=tile)
    few = grouped_gemm(x[37:44], weight, offsets_of((3, 4), device), bias, tile=tile)
    assert torch.equal(few, many[37:44])
