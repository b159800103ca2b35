"""Models of other shapes: towers, graphs, trees, loops of one block, U-Nets."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from budget_jobs.model_job import Made, Perceptron, SparseJob, Stack, W, model


@model("neural ODE")
class Ode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(W, 64), nn.Tanh(), nn.Linear(64, W))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):  # Heun
            k = self.field(x)
            x = x + 0.1 * (k + self.field(x + 0.1 * k)) / 2
        return x


@model("VAE")
def vae() -> Made:
    module = nn.ModuleDict(
        {
            "encoder": nn.Sequential(Perceptron(), Perceptron(), nn.Linear(W, 16)),
            "decoder": nn.Sequential(nn.Linear(8, W), Perceptron(), Perceptron()),
        }
    )

    def loss() -> Tensor:
        x = torch.randn(256, W)
        mean, log_variance = module["encoder"](x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).mean() / 2
        return F.mse_loss(module["decoder"](z), x) + divergence

    return module, loss


@model("autoencoder")
class Autoencoder(nn.Module):
    shape = (4, 3, 32, 32)

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 8, 16, 32]
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(1, b), nn.SiLU()) for a, b in pairs
        )
        self.up = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose2d(b, a, 2, 2), nn.GELU()) for a, b in reversed(pairs)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.down, *self.up):
            x = block(x)
        return x


@model("Siamese")
def siamese() -> Made:
    module = Stack(4, lambda _: Perceptron())

    def loss() -> Tensor:
        x = torch.randn(256, W)
        a, b = module(x), module(x + torch.randn_like(x))
        return F.triplet_margin_loss(a, b, b.roll(1, 0))

    return module, loss


@model("towers in a dict")
class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({k: Stack(3, lambda _: Perceptron()) for k in "abc"})
        self.out = nn.Linear(3 * W, W)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.cat([tower(x) for tower in self.towers.values()], -1))
        return y


@model("one block, many times")
class Universal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Perceptron()
        self.times = nn.Parameter(torch.randn(6, W))

    def forward(self, x: Tensor) -> Tensor:
        for time in self.times:
            x = self.block(x + time)
        return x


@model("image and text towers")
class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, W, 4, 4),
            nn.Flatten(2),
            nn.Linear(64, 1),
            nn.Flatten(1),
            *(Perceptron() for _ in range(3)),
        )
        self.words = nn.Embedding(50, W)
        self.text = Stack(3, lambda _: nn.TransformerEncoderLayer(W, 2, W, batch_first=True))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        images = self.image(x.view(16, 3, 32, 32))
        texts = self.text(self.words(torch.randint(50, (16, 24)))).mean(1)
        scores = self.scale.exp() * F.normalize(images) @ F.normalize(texts).T
        return F.cross_entropy(scores, torch.arange(16))

    shape = (16, 3 * 32 * 32)


@model("parameters in a list")
class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(W, W) / 6 for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = F.gelu(x @ weight) + x
        return x


class Crossing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(W, 4, dropout=0.1, batch_first=True)
        self.inner = Stack(2, lambda _: Perceptron())

    def forward(self, latents: Tensor, x: Tensor) -> Tensor:
        y: Tensor = self.inner(latents + self.attention(latents, x, x)[0])
        return y


@model("Perceiver")
class Perceiver(nn.Module):
    shape = (8, 64, W)

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(16, W))
        self.blocks = nn.ModuleList(Crossing() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.latents.expand(len(x), -1, -1)
        for block in self.blocks:
            h = block(h, x)
        return h


@model("embedding bags and crosses")
class Recommender(nn.Module):
    shape = (256, 8)

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(100, W) for _ in range(4))
        self.bottom = nn.Sequential(nn.Linear(8, W), Perceptron())
        self.top = nn.Sequential(nn.Linear(25, W), Perceptron(), Perceptron(), nn.Linear(W, 1))

    def forward(self, x: Tensor) -> Tensor:
        found = [bag(torch.randint(100, (len(x), 5))) for bag in self.bags]
        all_of = torch.stack([self.bottom(x), *found], 1)
        y: Tensor = self.top((all_of @ all_of.transpose(1, 2)).flatten(1))
        return y


@model("sparse embeddings", SparseJob)
def sparse() -> Made:
    module = nn.Sequential(nn.Embedding(500, W, sparse=True), *(Perceptron() for _ in range(4)))
    return module, lambda: module(torch.randint(500, (256,))).square().mean()


@model("PointNet")
class Points(nn.Module):
    shape = (8, 64, W)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2 * W, W) for _ in range(5))
        self.inner = nn.ModuleList(Perceptron() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block, inner in zip(self.blocks, self.inner, strict=True):
            most = x.max(1, keepdim=True).values.expand_as(x)
            x = inner(F.relu(block(torch.cat([x, most], -1))))
        return x


@model("fixed point")
class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(W, W), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            z = torch.zeros_like(x)
            with torch.no_grad():
                for _ in range(5):
                    z = layer(z + x)
            x = layer(z + x)
        return x


@model("losses at each depth")
class Supervised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Perceptron() for _ in range(5))
        self.heads = nn.ModuleList(nn.Linear(W, 10) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            found.append(F.log_softmax(head(x), -1)[:, :1])
        return torch.stack(found)


@model("tree")
class Tree(nn.Module):
    """Splits the batch into halves recursively, and joins their results."""

    def __init__(self) -> None:
        super().__init__()
        self.join = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * W, W), nn.Tanh(), Perceptron()) for _ in range(5)
        )

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        if depth == 5:
            return x
        one, other = x.chunk(2)
        pair = [self.forward(one, depth + 1), self.forward(other, depth + 1)]
        y: Tensor = self.join[depth](torch.cat(pair, -1))
        return y


@model("U-Net of one dimension")
class UNet(nn.Module):
    shape = (8, 8, 128)

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv1d(8, 8, 3, 2, 1) for _ in range(3))
        self.up = nn.ModuleList(nn.Conv1d(16, 8, 3, 1, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            kept.append(x)
            x = F.silu(block(x))
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = F.silu(block(torch.cat([x, kept.pop()], 1)))
        return x


@model("segments with a memory")
class Segments(nn.Module):
    """Transformer-XL: each segment also attends to the previous segment."""

    shape = (8, 64, W)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Crossing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        memories: list[Tensor | None] = [None] * len(self.blocks)
        for h in x.chunk(4, 1):
            for number, block in enumerate(self.blocks):
                memory = memories[number]
                seen = h if memory is None else torch.cat([memory, h], 1)
                memories[number] = h.detach()
                h = block(h, seen)
        return h
