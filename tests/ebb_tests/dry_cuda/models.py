"""Models whose memory is measured on the dry CUDA runtime."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, BATCH, LENGTH, LAYERS = 256, 4, 8, 256, 8


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class NormedMLP(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Residual(NormedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    """Of a GPT, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(), NormedMLP()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.dropout(self.mlp(x))


KINDS = {
    "MLP": MLP,
    "LayerNorm and MLP": NormedMLP,
    "residual": Residual,
    "attention": Attention,
    "GPT": Block,
}


class Stack(nn.Module):
    """Equal blocks, and a loss."""

    def __init__(self, kind: str = "GPT", layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(KINDS[kind]() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Training:
    """A model on the device, and one batch."""

    def __init__(self, kind: str = "GPT", layers: int = LAYERS) -> None:
        torch.manual_seed(0)
        self.model = Stack(kind, layers).cuda()
        self.x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda")

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.model(self.x).backward()
