"""Weight and bias gradients of ragged groups against the loop over experts in float64."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from ep_moe import ops
from ep_moe.kernels.grouped_wgrad import grouped_bias_grad, grouped_wgrad
from ep_moe.testing import assert_close
from tests.helpers import offsets_of
from tests.kernels.cases import SIZES, TILES, dtypes_on, one_of, tolerance

pytestmark = pytest.mark.usefixtures("poisoned_memory")

WIDTHS = [(32, 40), (17, 5), (24, 70)]  # N_out, N_in
# Not swapped, and not flattened: a loop over no rows at all must still store its zeros.
OWN = {name: tile for name, tile in TILES.items() if not tile.swap and not tile.flatten}


def make(sizes, n_out, n_in, dtype, device, tail=3):
    """d_y and x in packed order, NaN behind the last expert, and arrived rows with the index that
    packs them."""
    rows = sum(sizes)
    d_y, x = (torch.randn(rows + tail, n).to(device, dtype) for n in (n_out, n_in))
    d_y[rows:], x[rows:] = torch.nan, torch.nan
    index = torch.randperm(rows + tail, device=device)[:rows]
    return d_y, x, index


def arrived(packed, index):
    """Rows whose index-th are the packed ones; a NaN row where nobody looks."""
    out = torch.full_like(packed, torch.nan)
    out[index] = packed[: len(index)]
    return out


def index_of(index, tail, device):
    """The index with a tail that points nowhere."""
    return torch.cat([index.int(), torch.full((tail,), -(2**30), dtype=torch.int32, device=device)])


def check(sizes, n_out, n_in, dtype, device, tile, gathered):
    d_y, x, index = make(sizes, n_out, n_in, dtype, device)
    offsets, rows = offsets_of(sizes, device), sum(sizes)
    operands = {"d_y": d_y, "x": x}
    options = {}
    if gathered:
        operands[gathered] = arrived(operands[gathered], index)
        options = {"arrived_of_packed": index_of(index, 3, device), "gathered": gathered}
    got = grouped_wgrad(*operands.values(), offsets, scale=1 / 3, tile=tile, **options)
    expected = ops.grouped_gemm_wgrad(d_y[:rows].double(), x[:rows].double(), offsets, scale=1 / 3)
    assert got.dtype == dtype
    assert_close(got, expected, name="d_weight", tolerance=tolerance(dtype))
    assert all((got[e] == 0).all() for e, size in enumerate(sizes) if not size)
    if gathered:
        return
    main = torch.randn(expected.shape, dtype=torch.float32, device=device)
    total = grouped_wgrad(
        *operands.values(), offsets, scale=1 / 3, into=main.clone(), tile=tile, **options
    )
    assert_close(total, main + expected, name="added", tolerance=tolerance(torch.float32))


@pytest.mark.parametrize("gathered", [None, "d_y", "x"])
@pytest.mark.parametrize("n_out,n_in", WIDTHS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("tile", OWN.values(), ids=OWN.keys())
def test_equals_the_loop(tile, sizes, n_out, n_in, gathered, device):
    for dtype in one_of(dtypes_on(device), tile, sizes, n_out, gathered):
        check(sizes, n_out, n_in, dtype, device, tile, gathered)


@hypothesis.given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    n_out=st.integers(1, 40),
    n_in=st.integers(1, 40),
    gathered=st.sampled_from([None, "d_y", "x"]),
    tile=st.sampled_from(list(OWN.values())),
)
@hypothesis.settings(max_examples=15)
def test_any_groups_and_widths(sizes, n_out, n_in, gathered, tile):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check(tuple(sizes), n_out, n_in, torch.float32, device, tile, gathered)


@pytest.mark.parametrize("gathered", [None, "d_y", "x"])
@pytest.mark.parametrize("tile", OWN.values(), ids=OWN.keys())
def test_no_rows_at_all(tile, gathered, device):
    """Nor behind the last expert: no descriptor takes nothing."""
    d_y, x, index = make((0, 0), 24, 40, torch.float32, device, tail=0)
    options = {"arrived_of_packed": index.int(), "gathered": gathered} if gathered else {}
    got = grouped_wgrad(d_y, x, offsets_of((0, 0), device), tile=tile, **options)
    assert torch.equal(got, torch.zeros(2, 24, 40, device=device))


@pytest.mark.parametrize("tile", OWN.values(), ids=OWN.keys())
def test_into_a_view(tile, device):
    """Of a buffer of all gradients, say; what lies beside it stays."""
    sizes = (5, 0, 20)
    d_y, x, _ = make(sizes, 24, 20, torch.float32, device, tail=0)
    offsets, buffer = offsets_of(sizes, device), torch.randn(24, 3, 22, device=device)
    before, view = buffer.clone(), buffer[:, :, :20].transpose(0, 1)
    assert grouped_wgrad(d_y, x, offsets, into=view, tile=tile) is view
    expected = before.double()
    added = ops.grouped_gemm_wgrad(d_y.double(), x.double(), offsets)
    expected[:, :, :20] += added.transpose(0, 1)
    assert_close(buffer, expected, name="buffer", tolerance=tolerance(torch.float32))
    assert torch.equal(buffer[:, :, 20:], before[:, :, 20:])


@pytest.mark.parametrize("tile", OWN.values(), ids=OWN.keys())
def test_a_nan_stays_with_its_expert(tile, device):
    """A block of rows reaches into the next expert's, and 0 * NaN is NaN."""
    sizes = (5, 20, 3)
    d_y, x, _ = make(sizes, 24, 20, torch.float32, device)
    d_y[5], x[25] = torch.nan, torch.nan
    bad = grouped_wgrad(d_y, x, offsets_of(sizes, device), tile=tile).isnan()
    assert not bad[0].any()
    assert bad[1].all()
    assert bad[2].all()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("columns", [1, 5, 128, 300])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_bias_gradient(sizes, columns, packed, weighted, device):
    for dtype in dtypes_on(device):
        d_y, _, index = make(sizes, columns, 1, dtype, device)
        rows, offsets = sum(sizes), offsets_of(sizes, device)
        gate = torch.rand(rows + 3, device=device)
        gate[rows:] = torch.nan
        got = grouped_bias_grad(
            d_y if packed else arrived(d_y, index),
            offsets,
            arrived_of_packed=None if packed else index_of(index, 3, device),
            gate_of_packed=gate if weighted else None,
            scale=0.5,
        )
        seen = d_y[:rows].double() * (gate[:rows, None].double() if weighted else 1)
        expected = ops.grouped_bias_grad(seen, offsets, scale=0.5)
        assert got.dtype == dtype
        assert_close(got, expected, name="d_bias", tolerance=tolerance(dtype))
