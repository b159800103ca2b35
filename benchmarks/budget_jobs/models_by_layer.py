"""Models that are a stack of one kind of block."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from budget_jobs.model_job import Made, Perceptron, Stack, W, model, stack

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
    """MobileNet's block, with squeeze and excitation, in place."""

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
    """WaveNet's block: a dilated convolution, a gate, and a skip connection to the end."""

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
    """RealNVP's coupling layer."""

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


class Generated(nn.Module):
    """A layer whose weights a second network computes."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(16))
        self.maker = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, W * W))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(F.linear(x, self.maker(self.code).view(W, W) / 8))


stack("HyperNetwork", 5, lambda _: Generated(), 256, W)


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
