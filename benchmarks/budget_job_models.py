"""Models of many shapes in a plain training loop, for `budgets_in_jobs.py`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import planner_models
import torch
import torch.nn.functional as F
from budget_job_kinds import Job
from torch import Tensor, nn

Loss = Callable[[], Tensor]
Made = tuple[nn.Module, Loss]
W = 32  # width


class ModelJob(Job):
    """Trains what `made` makes."""

    steps = 32  # enough also for jobs in which ebb measures steps again with other regions
    expected = "any"
    made: Callable[[], Made]

    def build(self) -> nn.Module:
        module, self.of_batch = type(self).made()
        return module.train()

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3)

    def loss(self, step: int) -> Tensor:
        return self.of_batch()


class SparseJob(ModelJob):
    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-2)

    def note(self, *losses: Tensor) -> None:
        self._digests["losses"].update(repr([loss.item() for loss in losses]).encode())


MODELS: dict[str, tuple[Callable[[], Made], type[ModelJob]]] = {}


def model(name: str, job: type[ModelJob] = ModelJob) -> Callable[[Any], Any]:
    """Of a function that gives a module and a function of its loss, or of a module's class, which
    is called by a batch of its `shape`, (256, W) by default."""

    def put(made: Any) -> Any:
        def of_class() -> Made:
            module = made()
            shape = getattr(made, "shape", (256, W))
            return module, lambda: module(torch.randn(shape)).square().mean()

        MODELS[name] = of_class if isinstance(made, type) else made, job
        return made

    return put


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, depth: int, block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(number) for number in range(depth))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class Perceptron(nn.Module):
    def __init__(self, width: int = W, activation: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.activation(self.up(self.norm(x))))
        return y


def stack(name: str, depth: int, block: Callable[[int], nn.Module], *shape: int) -> None:
    def made() -> Made:
        module = Stack(depth, block)
        return module, lambda: module(torch.randn(shape)).square().mean()

    model(name)(made)


for _name, _activation in {
    "SIREN": torch.sin,
    "squared ReLU": lambda x: F.relu(x).square(),
    "SELU": F.selu,
    "leaky ReLU in place": lambda x: F.leaky_relu_(x, 0.1),
    "softplus": F.softplus,
}.items():
    stack(_name, 5, lambda _, act=_activation: Perceptron(activation=act), 256, W)

stack(
    "post-LN, torch's layer",
    5,
    lambda _: nn.TransformerEncoderLayer(W, 4, 2 * W, batch_first=True),
    8,
    32,
    W,
)
stack(
    "pre-LN, torch's layer, no dropout",
    5,
    lambda _: nn.TransformerEncoderLayer(W, 4, 2 * W, 0.0, batch_first=True, norm_first=True),
    8,
    32,
    W,
)


@model("stages of stages")
class Stages(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(
                nn.Sequential(*(nn.Sequential(Perceptron(), nn.Dropout(0.1)) for _ in range(3)))
                for _ in range(3)
            )
        )


@model("brain float parameters")
def brain_float() -> Made:
    module = Stack(5, lambda _: Perceptron()).bfloat16()
    return module, lambda: module(torch.randn(256, W).bfloat16()).square().mean().float()


class RecurrentCells(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell, self.kind = getattr(nn, kind)(W, W), kind

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        c = torch.zeros_like(h)
        found = []
        for one in x:
            if self.kind == "LSTMCell":
                h, c = self.cell(one, (h, c))
            else:
                h = self.cell(one, h)
            found.append(h)
        return torch.stack(found)


for _kind in ("GRUCell", "LSTMCell", "RNNCell"):
    stack(f"{_kind} in loops", 4, lambda _, kind=_kind: RecurrentCells(kind), 12, 32, W)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lstm = nn.LayerNorm(W), nn.LSTM(W, W, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.lstm(self.norm(x))[0]
        return y


stack("LSTM layers", 4, lambda _: Lstm(), 16, 24, W)


class MixerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels = Perceptron(24), Perceptron(W)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.channels(self.tokens(x.transpose(1, 2)).transpose(1, 2))
        return y


stack("MLP-Mixer", 5, lambda _: MixerBlock(), 16, 24, W)


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(16, 16, 7, padding=3, groups=16)
        self.inner = Perceptron(16)
        self.scale = nn.Parameter(torch.full((16,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.depthwise(x).permute(0, 2, 3, 1)) * self.scale
        return x + y.permute(0, 3, 1, 2)


stack("ConvNeXt by hand", 4, lambda _: ConvNext(), 4, 16, 16, 16)


class Dense(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        inside = 8 + 8 * number
        self.norm, self.conv = nn.BatchNorm2d(inside), nn.Conv2d(inside, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


stack("DenseNet", 6, Dense, 4, 8, 16, 16)


class Inverted(nn.Module):
    """MobileNet's, with squeeze and excitation, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.norm1 = nn.Conv2d(8, 32, 1, bias=False), nn.BatchNorm2d(32)
        self.depth, self.norm2 = nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.BatchNorm2d(32)
        self.squeeze, self.excite = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.project, self.norm3 = nn.Conv2d(32, 8, 1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.hardswish(self.norm1(self.expand(x)), inplace=True)
        h = F.relu6(self.norm2(self.depth(h)), inplace=True)
        s = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(h, 1)), True)))
        y: Tensor = self.norm3(self.project(h * s))
        y += x
        return y


stack("MobileNet", 4, lambda _: Inverted(), 4, 8, 16, 16)


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 4, k, padding=k // 2), nn.ReLU()) for k in (1, 3, 5)
        )
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(16, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([*(branch(x) for branch in self.branches), self.pool(x)], 1)


stack("Inception", 5, lambda _: Inception(), 4, 16, 16, 16)


class Gated(nn.Module):
    """WaveNet's: a dilated convolution, a gate, and what is skipped to the end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(16, 32, 2, dilation=2**number)
        self.out, self.padding = nn.Conv1d(16, 32, 1), 2**number

    def forward(self, pair: Any) -> Any:
        x, skipped = pair
        a, b = self.conv(F.pad(x, (self.padding, 0))).chunk(2, 1)
        rest, skip = self.out(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
        return x + rest, skipped + skip


@model("WaveNet")
def wavenet() -> Made:
    module = Stack(5, Gated)

    def loss() -> Tensor:
        x = torch.randn(4, 16, 128)
        return module((x, torch.zeros_like(x)))[1].relu().square().mean()  # type: ignore

    return module, loss


class Coupling(nn.Module):
    """RealNVP's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(W // 2, 64), nn.Tanh(), nn.Linear(64, W))
        self.is_odd = number % 2

    def forward(self, pair: Any) -> Any:
        x, total = pair
        a, b = x.chunk(2, -1)
        a, b = (b, a) if self.is_odd else (a, b)
        scale, shift = self.net(a).chunk(2, -1)
        scale = torch.tanh(scale)
        return torch.cat([a, b * scale.exp() + shift], -1), total + scale.sum(-1)


@model("flow")
def flow() -> Made:
    module = Stack(6, Coupling)

    def loss() -> Tensor:
        z, total = module((torch.randn(256, W), torch.zeros(256)))
        return (z.square().sum(-1) / 2 - total).mean()  # type: ignore[no-any-return]

    return module, loss


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


class Message(nn.Module):
    """A layer of a graph network."""

    def __init__(self, attends: bool = False) -> None:
        super().__init__()
        self.attends = attends
        self.message, self.update = nn.Linear(2 * W, W), nn.Linear(2 * W, W)
        self.score = nn.Linear(W, 1)

    def forward(self, graph: Any) -> Any:
        x, source, target = graph
        m = F.relu(self.message(torch.cat([x[source], x[target]], -1)))
        if self.attends:
            weight = self.score(m).exp()
            total = torch.zeros(len(x), 1).index_add_(0, target, weight)
            m = m * weight / total[target]
        found = torch.zeros_like(x).index_add_(0, target, m)
        return x + self.update(torch.cat([x, found], -1)).tanh(), source, target


def graph_network(attends: bool) -> Made:
    module = Stack(4, lambda _: Message(attends))

    def loss() -> Tensor:
        edges = torch.randint(128, (2, 512))
        return module((torch.randn(128, W), *edges))[0].square().mean()  # type: ignore

    return module, loss


model("graph network")(lambda: graph_network(False))
model("graph attention")(lambda: graph_network(True))


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


class Generated(nn.Module):
    """Its weights are made by a network."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(16))
        self.maker = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, W * W))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(F.linear(x, self.maker(self.code).view(W, W) / 8))


stack("HyperNetwork", 5, lambda _: Generated(), 256, W)


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


class LinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        memory = torch.einsum("btd,bte->btde", k, v).cumsum(1)
        below = torch.einsum("btd,btd->bt", q, k.cumsum(1)) + 1e-3
        return x + torch.einsum("btd,btde->bte", q, memory) / below[..., None]


stack("linear attention", 4, lambda _: LinearAttention(), 4, 24, W)


class Decayed(nn.Module):
    """RWKV's recurrence, written as a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.kvr, self.decay = nn.Linear(W, 3 * W), nn.Parameter(torch.zeros(W))

    def forward(self, x: Tensor) -> Tensor:
        k, v, r = self.kvr(x).chunk(3, -1)
        state, found = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = state * torch.sigmoid(self.decay) + k[:, t].tanh() * v[:, t]
            found.append(torch.sigmoid(r[:, t]) * state)
        return x + torch.stack(found, 1)


stack("decaying state in a loop", 4, lambda _: Decayed(), 16, 16, W)


class SpatialGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.mix = nn.Linear(W, 64), nn.Linear(32, W), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        u, v = F.gelu(self.up(x)).chunk(2, -1)
        y: Tensor = x + self.down(u * self.mix(v.transpose(1, 2)).transpose(1, 2))
        return y


stack("gMLP", 5, lambda _: SpatialGate(), 16, 24, W)


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, 9, dtype=torch.cfloat) / 16)
        self.point = nn.Conv1d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.einsum("bik,iok->bok", torch.fft.rfft(x)[..., :9], self.weight)
        return x + F.gelu(torch.fft.irfft(low, x.shape[-1]) + self.point(x))


stack("Fourier operator", 4, lambda _: Fourier(), 8, 16, 64)


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
    """Recursion over halves."""

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


class Capsules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, 4, 4) / 4)

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("bid,ijde->bije", x, self.weight)
        scores = torch.zeros(votes.shape[:3])
        for _ in range(3):
            y = torch.einsum("bij,bije->bje", scores.softmax(2), votes)
            y = y * y.norm(dim=-1, keepdim=True) / (1 + y.square().sum(-1, keepdim=True))
            scores = scores + torch.einsum("bije,bje->bij", votes, y)
        return y


stack("capsules", 3, lambda _: Capsules(), 64, 8, 4)


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
    """Transformer-XL: what the last segment came to is attended to."""

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


# Models of other benchmarks and tests ------------------------------------------------------------


def of_planner(name: str) -> Callable[[], Made]:
    def made() -> Made:
        found = planner_models.MODELS[name](True)
        return found.module, found.loss

    return made


def of_tests(name: str) -> Callable[[], Made]:
    def made() -> Made:
        import real_models

        family = real_models.FAMILIES[name]
        module = family.build()

        def loss() -> Tensor:
            found = module(**family.batch())
            return found if isinstance(found, Tensor) else found.loss

        return module, loss

    return made


# transformers -------------------------------------------------------------------------------------

TEXT = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = {**TEXT, "num_key_value_heads": 2, "use_cache": False}
SPEECH = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 4],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "feat_extract_norm": "layer",
    "ctc_zero_infinity": True,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}
SEQUENCES = {
    "vocab_size": 101,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
}


def words(**more: Any) -> dict[str, Tensor]:
    ids = torch.randint(3, 101, (4, 32))
    return {"input_ids": ids, "labels": ids}


def images(**more: Any) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(5, (4,))}


def segments(**more: Any) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(5, (2, 32, 32))}


def sounds(**more: Any) -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 1600), "labels": torch.randint(1, 20, (2, 3))}


def spectra(**more: Any) -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 16, 64), "labels": torch.randint(3, 101, (2, 12))}


def captions(**more: Any) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(4, 3, 32, 32),
        "input_ids": torch.randint(3, 101, (4, 16)),
        "return_loss": True,
    }


HUGGING_FACE: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    # name: (model, config, batch, settings)
    **{
        name: (f"{name}ForCausalLM", f"{name}Config", words, {**DECODER, **more})
        for name, more in {
            "Llama": {},
            "Mistral": {"sliding_window": 8},
            "Qwen2": {},
            "Qwen3": {"head_dim": 8},
            "Gemma": {"head_dim": 8},
            "Gemma2": {"head_dim": 8, "sliding_window": 8},
            "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
            "Phi": {},
            "Phi3": {},
            "Cohere": {},
            "Granite": {},
            "Olmo": {},
            "Olmo2": {},
            "Starcoder2": {},
            "StableLm": {},
            "GPTNeoX": {},
            "Persimmon": {},
            "Glm": {"head_dim": 8},
        }.items()
    },
    **{
        name: (f"{name}ForMaskedLM", f"{name}Config", words, {**TEXT, "type_vocab_size": 2, **more})
        for name, more in {
            "Bert": {},
            "Roberta": {},
            "Electra": {"embedding_size": 16},
            "Albert": {"embedding_size": 16},
            "DebertaV2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
            "MobileBert": {
                "true_hidden_size": 32,
                "intra_bottleneck_size": 32,
                "embedding_size": 16,
            },
            "ConvBert": {"embedding_size": 16},
            "RoFormer": {},
            "MPNet": {},
        }.items()
    },
    "DistilBert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        words,
        {"vocab_size": 101, "dim": 32, "hidden_dim": 64, "n_layers": 4, "n_heads": 4},
    ),
    "GPT2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        words,
        {
            "vocab_size": 101,
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": 64,
            "use_cache": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "GPTNeo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        words,
        {
            "vocab_size": 101,
            "hidden_size": 32,
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "max_position_embeddings": 64,
            "use_cache": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        words,
        {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32, "use_cache": False},
    ),
    "Bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        words,
        {"vocab_size": 101, "hidden_size": 32, "n_layer": 4, "n_head": 4, "use_cache": False},
    ),
    "Falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        words,
        {
            "vocab_size": 101,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "use_cache": False,
        },
    ),
    "Mpt": (
        "MptForCausalLM",
        "MptConfig",
        words,
        {"vocab_size": 101, "d_model": 32, "n_layers": 4, "n_heads": 4, "use_cache": False},
    ),
    "Mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        words,
        {
            "vocab_size": 101,
            "hidden_size": 16,
            "state_size": 4,
            "num_hidden_layers": 3,
            "use_cache": False,
        },
    ),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        words,
        {
            "vocab_size": 101,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 3,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
    ),
    "Bart": ("BartForConditionalGeneration", "BartConfig", words, SEQUENCES),
    "Pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", words, SEQUENCES),
    "Whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        spectra,
        {**SEQUENCES, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64},
    ),
    "ViT": ("ViTForImageClassification", "ViTConfig", images, VISION),
    "DeiT": ("DeiTForImageClassification", "DeiTConfig", images, VISION),
    "BEiT": ("BeitForImageClassification", "BeitConfig", images, VISION),
    "Dinov2": ("Dinov2ForImageClassification", "Dinov2Config", images, {**VISION, "mlp_ratio": 2}),
    "Swin": (
        "SwinForImageClassification",
        "SwinConfig",
        images,
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 5,
        },
    ),
    "ConvNext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        images,
        {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [2, 3], "num_labels": 5},
    ),
    "ResNet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        images,
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": 5},
    ),
    "SegFormer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        segments,
        {
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [2, 2, 2, 2],
            "decoder_hidden_size": 16,
            "num_attention_heads": [1, 2, 2, 4],
            "num_labels": 5,
        },
    ),
    "PoolFormer": (
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        images,
        {"hidden_sizes": [8, 16, 24, 32], "depths": [2, 2, 2, 2], "num_labels": 5},
    ),
    "CLIP": (
        "CLIPModel",
        "CLIPConfig",
        captions,
        {
            "text_config": {**TEXT, "num_hidden_layers": 3},
            "vision_config": {**VISION, "num_hidden_layers": 3},
            "projection_dim": 16,
        },
    ),
    "SigLIP": (
        "SiglipModel",
        "SiglipConfig",
        captions,
        {
            "text_config": {**TEXT, "num_hidden_layers": 3},
            "vision_config": {**VISION, "num_hidden_layers": 3},
        },
    ),
    "Wav2Vec2": (
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        sounds,
        SPEECH,
    ),
    "Hubert": (
        "HubertForCTC",
        "HubertConfig",
        sounds,
        SPEECH,
    ),
}


def of_transformers(name: str) -> Callable[[], Made]:
    def made() -> Made:
        import transformers

        kind, config, batch, settings = HUGGING_FACE[name]
        module = getattr(transformers, kind)(getattr(transformers, config)(**settings))
        return module, lambda: module(**batch()).loss

    return made


def model_jobs() -> Iterator[tuple[str, type[ModelJob]]]:
    """Names, and jobs that train what they name."""
    found = dict(MODELS)
    found |= {f"planner: {name}": (of_planner(name), ModelJob) for name in planner_models.MODELS}
    if find_spec("transformers"):
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
        import real_models
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        found |= {f"tests: {one}": (of_tests(one), ModelJob) for one in real_models.FAMILIES}
        found |= {f"transformers: {one}": (of_transformers(one), ModelJob) for one in HUGGING_FACE}
    for name, (made, job) in found.items():
        yield name, type("ModelJob", (job,), {"made": staticmethod(made)})
