import pytest
import torch
from lm import LanguageModel, LMConfig, rotary_angles, rotate

from ep_moe import ConfigError, MoEConfig


def make_config(**changes):
    moe = MoEConfig(hidden_size=16, intermediate_size=24, num_experts=4, top_k=2)
    return LMConfig(**{"moe": moe, "num_layers": 2, "num_heads": 2} | changes)


def test_forward():
    model = LanguageModel(make_config(vocab_size=50))
    tokens = torch.randint(50, (3, 7))
    logits, stats = model(tokens)
    assert logits.shape == (3, 7, 50)
    assert [s.tokens_per_expert.sum().item() for s in stats] == [3 * 7 * 2] * 2


def test_a_byte_does_not_see_the_bytes_behind_it():
    model = LanguageModel(make_config())
    tokens = torch.randint(256, (1, 9))
    changed = tokens.clone()
    changed[0, 5] += 1
    before, after = model(tokens)[0], model(changed % 256)[0]
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_rotated_products_depend_on_the_distance():
    q, k = torch.randn(2, 8, dtype=torch.float64)
    turn = rotary_angles(10, 8, q.device)
    products = rotate(q.expand(10, 8), turn) @ rotate(k.expand(10, 8), turn).t()
    torch.testing.assert_close(products[:-1, :-1], products[1:, 1:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rotate(q.expand(10, 8), turn)[0], q)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_layers": 0}, "num_layers = 0, but it must be at least 1"),
        ({"num_heads": 3}, "hidden_size = 16, but it must be a multiple of 2 \\* num_heads = 6"),
    ],
)
def test_bad_sizes_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config(**changes)
