"""The kernels behind the order of sending: the cases of `tests.ops.test_send`."""

import pytest
import torch

from ep_moe import ops
from ep_moe.kernels import send
from tests.ops import test_send as cases

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Every op takes its kernel, on a CPU too."""
    order = "ep_moe.ops.send.send_order_ref"
    monkeypatch.setattr(order, lambda *args: ops.SendOrder(*send.send_order(*args)))
    monkeypatch.setattr("ep_moe.ops.send.open_blocks_ref", send.open_blocks)


SMALL = {"SCANNED": 256, "LANE": 64, "LINES": 32}
SIZES = {"as it is": {}, "small blocks": SMALL}
if not torch.cuda.is_available():  # the interpreter takes a Python call for each id that it scans
    SIZES["as it is"] = {"SCANNED": 512}


@pytest.fixture(params=SIZES.values(), ids=SIZES.keys())
def blocks(request, monkeypatch):
    """Small ones, so that few tokens take all steps: several lanes, scans, blocks of a lane."""
    for name, size in request.param.items():
        monkeypatch.setattr(send, name, size)


@pytest.mark.parametrize("absent", cases.ABSENT.values(), ids=cases.ABSENT.keys())
@pytest.mark.parametrize("case", cases.CASES.values(), ids=cases.CASES.keys())
def test_equals_a_loop_over_tokens(case, absent, blocks, device):
    cases.test_equals_a_loop_over_tokens(case, absent, device)


@pytest.mark.parametrize("lines", [0, 7, 1000])
def test_rows_that_find_no_line_are_counted_alone(lines, blocks, device):
    cases.test_rows_that_find_no_line_are_counted_alone(lines, device)


def test_wide_ids_gates_and_strides(blocks, device):
    cases.test_wide_ids_gates_and_strides(device)


@pytest.mark.parametrize("most", [1, 40])
def test_equals_the_reference_with_any_number_of_programs(most, monkeypatch, device):
    """Among lanes there are some without a token."""
    for name, size in {**SMALL, "LANE": 8, "MOST": most}.items():
        monkeypatch.setattr(send, name, size)
    ids, gates = cases.random_routing(65, 12, 4, 0.3, device)
    found, blocks = cases.send(ids, gates, 12, 4, 40)
    on_cpu = ops.empty_blocks(4, lines=40, top_k=4, gates=gates.dtype, device=torch.device("cpu"))
    expected = ops.send_order_ref(ids.cpu(), gates.cpu(), 12, on_cpu)
    sent = int(found.offsets[-1])
    assert torch.equal(found.token_of_sent[:sent].cpu(), expected.token_of_sent)
    assert torch.equal(found.sent_of_token.cpu(), expected.sent_of_token)
    assert torch.equal(found.offsets.cpu(), expected.offsets)
    assert torch.equal(blocks.cpu(), on_cpu)
