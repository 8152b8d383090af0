"""A decoder-only language model whose feed-forward layers are `ep_moe.MoELayer`.

B sequences, L tokens each, H hidden size, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ep_moe
from ep_moe.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LMConfig:
    """The model.

    Args:
        moe: every block's feed-forward layer; its hidden_size is the model's
        num_layers: blocks
        num_heads: attention heads; hidden_size must be an even multiple
        vocab_size: 256 = bytes
    """

    moe: ep_moe.MoEConfig
    num_layers: int
    num_heads: int
    vocab_size: int = 256

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "at least 1")
        if self.moe.hidden_size % (2 * self.num_heads):
            rule = f"a multiple of 2 * num_heads = {2 * self.num_heads}, for pairs of channels"
            raise ConfigError("moe.hidden_size", self.moe.hidden_size, rule)


class LanguageModel(nn.Module):
    """Bytes to next-byte logits, and the routing statistics of every layer."""

    def __init__(self, config: LMConfig, *, ep: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.config = config
        hidden_size = config.moe.hidden_size
        self.head_size = hidden_size // config.num_heads
        self.embedding = nn.Embedding(config.vocab_size, hidden_size)
        self.blocks = nn.ModuleList(Block(config, ep) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(hidden_size)
        self.head = nn.Linear(hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[ep_moe.RoutingStats]]:
        """tokens (B,L) int64 -> logits (B,L,V), one RoutingStats a layer"""
        x = self.embedding(tokens)
        turn = rotary_angles(tokens.shape[1], self.head_size, x.device)
        all_stats = []
        for block in self.blocks:
            x, stats = block(x, turn)
            all_stats.append(stats)
        return self.head(self.norm(x)), all_stats

    def moe_layers(self) -> list[ep_moe.MoELayer]:
        """From the first block to the last."""
        return [module for module in self.modules() if isinstance(module, ep_moe.MoELayer)]


class Block(nn.Module):
    """Pre-norm attention, then the experts."""

    def __init__(self, config: LMConfig, ep: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.moe.hidden_size)
        self.attention = Attention(config.moe.hidden_size, config.num_heads)
        self.moe_norm = nn.RMSNorm(config.moe.hidden_size)
        self.moe = ep_moe.MoELayer(config.moe, ep=ep)

    def forward(self, x: Tensor, turn: Tensor) -> tuple[Tensor, ep_moe.RoutingStats]:
        """x (B,L,H)"""
        x = x + self.attention(self.attention_norm(x), turn)
        y, stats = self.moe(self.moe_norm(x))
        return x + y, stats


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """x (B,L,H), turn (L, head size / 2)"""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, L, head size)
        y = F.scaled_dot_product_attention(rotate(q, turn), rotate(k, turn), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotary_angles(length: int, head_size: int, device: torch.device) -> Tensor:
    """(length, head_size / 2): position l turns the i-th pair by l / 10000^(2 i / head_size)."""
    pair = torch.arange(head_size // 2, device=device)
    return torch.arange(length, device=device)[:, None] * 10000.0 ** (-2 * pair / head_size)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn channel i of x (..., L, head size) together with channel i + head size / 2."""
    cos, sin = turn.cos().to(x.dtype), turn.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
