"""Llama-shaped language models in bfloat16 for a GPU, and a tiny one for quick runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workloads import LlamaBlock, Runner, Workload


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    width: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    batch: int
    dtype: torch.dtype


BILLION = Shape(
    "Llama-shaped model, 1.2 B parameters, bf16, 2 x 2048 tokens",
    layers=16,
    width=2048,
    hidden=8192,
    heads=32,
    vocabulary=32_000,
    length=2048,
    batch=2,
    dtype=torch.bfloat16,
)
GPT2 = Shape(
    "GPT-2 sized model, 0.15 B parameters, bf16, 16 x 1024 tokens, AdamW",
    layers=12,
    width=768,
    hidden=3072,
    heads=12,
    vocabulary=50_304,
    length=1024,
    batch=16,
    dtype=torch.bfloat16,
)
TINY = Shape(
    "Llama-shaped model, tiny",
    layers=2,
    width=32,
    hidden=64,
    heads=2,
    vocabulary=64,
    length=16,
    batch=2,
    dtype=torch.float32,
)


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(
            LlamaBlock(shape.width, shape.heads, shape.hidden) for _ in range(shape.layers)
        )
        self.norm = nn.Parameter(torch.ones(shape.width))
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def loss(self, run: Runner, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The next-token loss; each block, and nothing else, is run by `run`."""
        h = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            h = run(block, h, cos, sin)
        logits: Tensor = self.head(LlamaBlock.norm(h, self.norm))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def rotary_angles(shape: Shape) -> Tensor:
    size = shape.width // shape.heads
    frequencies = 10_000 ** -(torch.arange(0, size, 2) / size)
    return torch.outer(torch.arange(shape.length), frequencies).repeat(1, 2)


def language_model(shape: Shape) -> Workload:
    model = Llama(shape).to(shape.dtype)
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1))
    angles = rotary_angles(shape)
    cos, sin = angles.cos().to(shape.dtype), angles.sin().to(shape.dtype)

    def forward(run: Runner) -> Tensor:
        return model.loss(run, tokens, cos, sin)

    return Workload(shape.name, forward, list(model.parameters()))
