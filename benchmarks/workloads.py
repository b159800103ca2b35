"""The programs that the benchmarks run: random weights, plain torch, no randomness.

Every block calls its matrix products, convolutions and attention through `product`. This is a plain
call, unless a system that saves regions of source code (torch-remat) replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Block: TypeAlias = Callable[..., Tensor]
Runner: TypeAlias = Callable[..., Tensor]  # (block, *inputs): runs a block in some way
Product: TypeAlias = Callable[..., Tensor]  # (operator, function, *arguments, last=False)


def plain_call(
    operator: str, function: Callable[..., Tensor], *arguments: Tensor, last: bool = False
) -> Tensor:
    """Calls `function`, whose one expensive op is `operator`.

    `last`: no later op of the block needs the result for backward, so no replay needs it.
    """
    return function(*arguments)


product: Product = plain_call


@contextmanager
def products_called_by(call: Product) -> Iterator[None]:
    """Replaces `product` inside the with-block."""
    global product
    before, product = product, call
    try:
        yield
    finally:
        product = before


@dataclass
class Workload:
    """A program to measure.

    Attributes:
        name: shown in the results.
        forward: computes the loss; runs each block with the given runner.
        leaves: the tensors that get gradients.
        buffers: state that forward updates; must be the same under each system.
    """

    name: str
    forward: Callable[[Runner], Tensor]
    leaves: list[Tensor]
    buffers: list[Tensor] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.leaves[0].device

    def step(self, run: Runner) -> None:
        self.forward(run).backward()  # type: ignore[no-untyped-call]

    def clear_gradients(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


def run_directly(block: Block, *inputs: Tensor) -> Tensor:
    """The runner of eager: calls the block."""
    return block(*inputs)


def blocks_in_turn(name: str, blocks: list[Any], x: Tensor, *others: Tensor) -> Workload:
    """A workload that feeds `x` through the blocks; each of them also gets `others`."""

    def forward(run: Runner) -> Tensor:
        h = x
        for block in blocks:
            h = run(block, h, *others)
        return h.square().mean()

    modules = [block for block in blocks if isinstance(block, nn.Module)]
    leaves = [x, *(p for module in modules for p in module.parameters())]
    # A chain of ops is no module: `others` contains its weights.
    leaves += [other for other in others if other.requires_grad]
    return Workload(name, forward, leaves, [b for module in modules for b in module.buffers()])


class LlamaBlock(nn.Module):
    """A Llama decoder block as Hugging Face writes it: RMSNorm, rotary positions, SwiGLU."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.Parameter(torch.ones(dim))
        self.norm2 = nn.Parameter(torch.ones(dim))
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    @staticmethod
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return weight * (x * torch.rsqrt(variance + 1e-6))

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * cos + turned * sin

    def add_down(self, x: Tensor, h: Tensor) -> Tensor:
        change: Tensor = self.down(h)
        return x + change

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, dim = x.shape
        shape = (batch, length, self.heads, dim // self.heads)
        h = self.norm(x, self.norm1)
        q = self.rotate(product("mm", self.q, h).view(shape).transpose(1, 2), cos, sin)
        k = self.rotate(product("mm", self.k, h).view(shape).transpose(1, 2), cos, sin)
        v = product("mm", self.v, h).view(shape).transpose(1, 2)
        a = product("attention", causal_attention, q, k, v)
        x = x + product("mm", self.o, a.transpose(1, 2).reshape(batch, length, dim))
        h = self.norm(x, self.norm2)
        h = F.silu(product("mm", self.gate, h)) * product("mm", self.up, h)
        return product("mm", self.add_down, x, h, last=True)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class PreNormBlock(nn.Module):
    """A pre-LN transformer block with fused qkv and a GELU MLP."""

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)

    def add_fc2(self, x: Tensor, h: Tensor) -> Tensor:
        change: Tensor = self.fc2(h)
        return x + change

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        shape = (batch, length, 3, self.heads, dim // self.heads)
        q, k, v = product("addmm", self.qkv, self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        a = product("attention", causal_attention, q, k, v)
        x = x + product("addmm", self.out, a.transpose(1, 2).reshape(batch, length, dim))
        h = F.gelu(product("addmm", self.fc1, self.norm2(x)))
        return product("addmm", self.add_fc2, x, h, last=True)


class ConvolutionBlock(nn.Module):
    """A residual block of two convolutions, each with BatchNorm in training mode."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(product("convolution", self.conv1, x)))
        return F.relu(x + self.norm2(product("convolution", self.conv2, h)))


class MixtureBlock(nn.Module):
    """A mixture-of-experts layer: each token goes to the two experts that its router prefers."""

    def __init__(self, dim: int, experts: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.ModuleList(nn.Linear(dim, hidden, bias=False) for _ in range(experts))
        self.down = nn.ModuleList(nn.Linear(hidden, dim, bias=False) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, -2)
        scores = product("mm", self.router, tokens).softmax(-1)
        weights, chosen = scores.topk(2, dim=-1)
        mixed = torch.zeros_like(tokens)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, rank = torch.where(chosen == expert)
            h = product("mm", down, F.gelu(product("mm", up, tokens[token])))
            mixed = mixed.index_add(0, token, h * weights[token, rank].unsqueeze(-1))
        return x + mixed.view_as(x)


def chain_with_products(operations: int) -> Block:
    """A chain of ops of which every eighth is an `mm` and the others are elementwise.

    The elementwise ones save their input (sin, square), their output (tanh, sigmoid), an input and
    a weight (mul), or nothing (add, sub) for backward.
    """

    def block(h: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        for _ in range(operations // 8):
            h = product("mm", torch.mm, h, weight)
            h = h.tanh().add(scale).sin().mul(scale).sigmoid().square().sub(scale)
        return h

    return block


def chain_of_elementwise(operations: int) -> Block:
    """A chain of elementwise ops that save their inputs, their output, or nothing."""

    def block(h: Tensor, scale: Tensor) -> Tensor:
        for _ in range(operations // 5):
            h = h.sin().add(scale).tanh().mul(scale).sub(scale)
        return h

    return block


def llama_tiny() -> Workload:
    x = torch.randn(1, 4, 16, requires_grad=True)
    block = LlamaBlock(16, heads=2, hidden=32)
    return blocks_in_turn("Llama block, tiny", [block], x, torch.randn(4, 8), torch.randn(4, 8))


def chain_256() -> Workload:
    x = torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(8, 8, requires_grad=True)
    scale = torch.randn(8, requires_grad=True)
    return blocks_in_turn("256 ops on 4 x 8", [chain_with_products(256)], x, weight, scale)


def chain_500() -> Workload:
    x = torch.randn(4, 8, requires_grad=True)
    scale = torch.randn(8, requires_grad=True)
    return blocks_in_turn("500 elementwise ops", [chain_of_elementwise(500)], x, scale)


def pre_norm(width: int) -> Callable[[], Workload]:
    def make() -> Workload:
        x = torch.randn(2, 96, width, requires_grad=True)
        blocks = [PreNormBlock(width) for _ in range(4)]
        return blocks_in_turn(f"4 pre-LN blocks, width {width}", blocks, x)

    return make


def convolutions() -> Workload:
    x = torch.randn(4, 32, 16, 16, requires_grad=True)
    blocks = [ConvolutionBlock(32) for _ in range(4)]
    return blocks_in_turn("4 convolution blocks with BatchNorm", blocks, x)


def mixture() -> Workload:
    x = torch.randn(2, 64, 128, requires_grad=True)
    blocks = [MixtureBlock(128, experts=4, hidden=256) for _ in range(2)]
    return blocks_in_turn("2 MoE blocks, 4 experts", blocks, x)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "Llama block, tiny": llama_tiny,
    "256 ops on 4 x 8": chain_256,
    "500 elementwise ops": chain_500,
    "4 pre-LN blocks, width 64": pre_norm(64),
    "4 pre-LN blocks, width 256": pre_norm(256),
    "4 pre-LN blocks, width 512": pre_norm(512),
    "4 pre-LN blocks, width 1024": pre_norm(1024),
    "4 convolution blocks with BatchNorm": convolutions,
    "2 MoE blocks, 4 experts": mixture,
}
