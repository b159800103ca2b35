"""Sequence models for the benchmarks of plans: transformers of several kinds, and Mamba."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, **options: Any) -> Tensor:
    def split(x: Tensor) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    found = F.scaled_dot_product_attention(split(q), split(k), split(v), **options)
    return found.transpose(1, 2).flatten(2)


class Encoder(nn.Module):
    """A pre-LN block with dropout, as in GPT-2 and ViT."""

    def __init__(self, width: int, heads: int, dropout: float, is_causal: bool = False) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.dropout(self.out(attention(q, k, v, self.heads, is_causal=self.is_causal)))
        h = self.down(F.gelu(self.up(self.norm2(x))))
        return x + self.dropout(h)  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """Blocks between embeddings of tokens and positions, and the output head."""

    def __init__(
        self, vocabulary: int, length: int, width: int, blocks: Iterable[nn.Module]
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            h = block(h)
        return F.linear(self.norm(h), self.words.weight)


class Gpt(LanguageModel):
    def __init__(self, vocabulary: int, length: int, width: int, depth: int) -> None:
        blocks = (Encoder(width, heads=4, dropout=0.1, is_causal=True) for _ in range(depth))
        super().__init__(vocabulary, length, width, blocks)


class Experts(nn.Module):
    """Each token goes to the two experts that the router prefers."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 2 * width, bias=False),
                nn.GELU(),
                nn.Linear(2 * width, width, bias=False),
            )
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == number)
            mixed.index_add_(0, token, expert(tokens[token]) * weights[token, rank, None])
        return mixed.view_as(x)


class MixtureBlock(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mixture = Experts(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(attention(q, k, v, 4, is_causal=True))
        return x + self.mixture(self.norm2(x))  # type: ignore[no-any-return]


class Mixture(LanguageModel):
    """A mixture of experts in each block."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, experts: int) -> None:
        blocks = (MixtureBlock(width, experts) for _ in range(depth))
        super().__init__(vocabulary, length, width, blocks)


class RootMeanSquare(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class T5Attention(nn.Module):
    """Attention in single operators, as in T5: scores, relative bias, softmax, dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = RootMeanSquare(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, memory: Tensor | None, bias: Tensor) -> Tensor:
        normed = self.norm(x)
        source = normed if memory is None else memory
        q, k, v = (
            layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, h in ((self.q, normed), (self.k, source), (self.v, source))
        )
        scores = q @ k.transpose(-1, -2) + bias
        h = self.dropout(scores.softmax(-1)) @ v
        return x + self.dropout(self.o(h.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


class T5Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = RootMeanSquare(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(F.relu(self.up(self.norm(x))))
        return x + self.dropout(self.down(h))  # type: ignore[no-any-return]


class T5Block(nn.Module):
    def __init__(self, width: int, heads: int, has_memory: bool) -> None:
        super().__init__()
        self.attention = T5Attention(width, heads)
        self.cross = T5Attention(width, heads) if has_memory else None
        self.mlp = T5Mlp(width)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.attention(x, None, bias)
        if self.cross is not None and memory is not None:
            x = self.cross(x, memory, torch.zeros_like(bias[..., :1]))
        result: Tensor = self.mlp(x)
        return result


class T5Stack(nn.Module):
    """T5's encoder or decoder. All blocks share one relative position bias."""

    def __init__(self, width: int, heads: int, depth: int, is_decoder: bool) -> None:
        super().__init__()
        self.is_decoder = is_decoder
        self.bias = nn.Embedding(32, heads)
        self.block = nn.ModuleList(T5Block(width, heads, is_decoder) for _ in range(depth))
        self.norm = RootMeanSquare(width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        places = torch.arange(x.shape[1])
        distances = (places[None, :] - places[:, None]).abs().clamp(max=31)
        bias = self.bias(distances).permute(2, 0, 1)[None]
        if self.is_decoder:
            bias = bias.masked_fill(places[None, :] > places[:, None], -1e9)
        for block in self.block:
            x = block(x, bias, memory)
        result: Tensor = self.norm(x)
        return result


class EncoderDecoder(nn.Module):
    """T5: the decoder attends to the encoder's output."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.encoder = T5Stack(width, heads, depth, is_decoder=False)
        self.decoder = T5Stack(width, heads, depth, is_decoder=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        h = self.decoder(self.words(target), self.encoder(self.words(source)))
        return F.linear(h / math.sqrt(h.shape[-1]), self.words.weight)


class MambaBlock(nn.Module):
    """A selective state space, its scan written in torch: one small step after another."""

    def __init__(self, width: int, states: int = 8) -> None:
        super().__init__()
        inner = 2 * width
        self.rank, self.states = max(1, width // 16), states
        self.norm = RootMeanSquare(width)
        self.enter = nn.Linear(width, 2 * inner, bias=False)
        self.convolution = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.select = nn.Linear(inner, self.rank + 2 * states, bias=False)
        self.time = nn.Linear(self.rank, inner)
        self.decay = nn.Parameter(torch.arange(1, states + 1).float().log().repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))
        self.leave = nn.Linear(inner, width, bias=False)

    def scan(self, x: Tensor) -> Tensor:
        time, read, write = self.select(x).split((self.rank, self.states, self.states), -1)
        time = F.softplus(self.time(time))
        keep = torch.exp(time[..., None] * -self.decay.exp())
        add = (time * x)[..., None] * read[:, :, None]
        state = torch.zeros_like(add[:, 0])
        found = []
        for place in range(x.shape[1]):
            state = keep[:, place] * state + add[:, place]
            found.append((state * write[:, place, None]).sum(-1))
        return torch.stack(found, 1) + x * self.skip

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.enter(self.norm(x)).chunk(2, -1)
        h = self.convolution(h.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        h = self.scan(F.silu(h))
        return x + self.leave(h * F.silu(gate))  # type: ignore[no-any-return]


class Mamba(nn.Module):
    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(MambaBlock(width) for _ in range(depth))
        self.norm = RootMeanSquare(width)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.words(tokens)
        for layer in self.layers:
            h = layer(h)
        return F.linear(self.norm(h), self.words.weight)
