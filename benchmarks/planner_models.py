"""Models for the benchmarks of plans: small, in plain torch, with the structure of real models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from language_model import Llama, Shape, rotary_angles
from planner_sequences import Encoder, EncoderDecoder, Gpt, Mamba, Mixture
from torch import Tensor, nn


class Residual(nn.Module):
    """A block of a ResNet: two convolutions with BatchNorm, and a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)), inplace=True)
        h = self.bn2(self.conv2(h))
        h += self.shortcut(x)
        return F.relu(h, inplace=True)


class ResNet(nn.Module):
    def __init__(self, widths: Iterable[int], depth: int) -> None:
        super().__init__()
        stages = []
        first = inside = next(iter(widths))
        for number, outside in enumerate(widths):
            blocks = [Residual(inside, outside, 1 if number == 0 else 2)]
            blocks += [Residual(outside, outside, 1) for _ in range(depth - 1)]
            stages.append(nn.Sequential(*blocks))
            inside = outside
        self.conv = nn.Conv2d(3, first, 7, stride=2, padding=3, bias=False)
        self.bn = nn.BatchNorm2d(first)
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inside, 100)

    def forward(self, image: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(self.bn(self.conv(image)), inplace=True), 3, 2, 1)
        logits: Tensor = self.head(self.stages(h).mean((2, 3)))
        return logits


class TwoConvolutions(nn.Sequential):
    def __init__(self, inside: int, outside: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inside, outside):
            layers += [
                nn.Conv2d(channels, outside, 3, padding=1),
                nn.GroupNorm(4, outside),
                nn.SiLU(),
            ]
        super().__init__(*layers)


class UNet(nn.Module):
    """A U-Net: the up path concatenates the results of the down path (skip connections)."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = list(zip((3, *widths[:-1]), widths, strict=True))
        self.down = nn.ModuleList(TwoConvolutions(a, b) for a, b in pairs)
        above = list(zip(reversed(widths[:-1]), reversed(widths[1:]), strict=True))
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in above)
        self.up = nn.ModuleList(TwoConvolutions(2 * a, a) for a, _ in above)
        self.last = nn.Conv2d(widths[0], 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        kept = []
        h = image
        for number, block in enumerate(self.down):
            h = block(F.max_pool2d(h, 2) if number else h)
            kept.append(h)
        kept.pop()
        for enlarge, block in zip(self.enlarge, self.up, strict=True):
            h = block(torch.cat((kept.pop(), enlarge(h)), 1))
        result: Tensor = self.last(h)
        return result


class VisionTransformer(nn.Module):
    def __init__(self, size: int, patch: int, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.position = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.ModuleList(Encoder(width, heads=4, dropout=0.1) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 100)

    def forward(self, image: Tensor) -> Tensor:
        h = self.patches(image).flatten(2).transpose(1, 2)
        h = torch.cat((self.class_token.expand(len(h), -1, -1), h), 1) + self.position
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(self.norm(h[:, 0]))
        return logits


@dataclass
class Model:
    """A model and its training data.

    Attributes:
        name: shown in the results.
        module: the network.
        loss: computes the loss of one fixed batch.
    """

    name: str
    module: nn.Module
    loss: Callable[[], Tensor]

    def step(self) -> None:
        """Runs forward and backward with the same random numbers each time. Accumulates
        gradients."""
        torch.manual_seed(1)
        self.loss().backward()  # type: ignore[no-untyped-call]

    def clear_gradients(self) -> None:
        self.module.zero_grad(set_to_none=True)


VOCABULARY = 2048


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def language(name: str, module: nn.Module, batch: int, length: int) -> Model:
    """A `Model` that predicts the next token of random text."""
    tokens = _tokens(batch, length + 1)

    def loss() -> Tensor:
        logits = module(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Model(name, module, loss)


def gpt(small: bool) -> Model:
    width, length = (64, 32) if small else (256, 256)
    return language("GPT", Gpt(VOCABULARY, length, width, depth=8), 4, length)


def llama(small: bool) -> Model:
    width, length = (64, 32) if small else (256, 256)
    shape = Shape("Llama", 8, width, 11 * width // 4, 4, VOCABULARY, length, 4, torch.float32)
    module = Llama(shape)
    tokens, angles = _tokens(shape.batch, length + 1), rotary_angles(shape)
    cos, sin = angles.cos(), angles.sin()

    def loss() -> Tensor:
        return module.loss(lambda block, *inputs: block(*inputs), tokens, cos, sin)

    return Model("Llama", module, loss)


def mixture(small: bool) -> Model:
    width, length = (64, 32) if small else (256, 256)
    return language("MoE", Mixture(VOCABULARY, length, width, depth=6, experts=8), 4, length)


def mamba(small: bool) -> Model:
    width, length = (32, 16) if small else (128, 128)
    return language("Mamba", Mamba(VOCABULARY, width, depth=6), 4, length)


def t5(small: bool) -> Model:
    width, length = (64, 32) if small else (256, 192)
    module = EncoderDecoder(VOCABULARY, width, depth=4)
    source, target = _tokens(4, length), _tokens(4, length + 1)

    def loss() -> Tensor:
        logits = module(source, target[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())

    return Model("T5", module, loss)


def vision_transformer(small: bool) -> Model:
    size, width = (32, 64) if small else (128, 256)
    return classifier("ViT", VisionTransformer(size, size // 16, width, depth=8), 4, size)


def resnet(small: bool) -> Model:
    size, first = (32, 8) if small else (128, 48)
    widths = [first << stage for stage in range(4)]
    return classifier("ResNet", ResNet(widths, depth=3), 16, size)


def classifier(name: str, module: nn.Module, batch: int, size: int) -> Model:
    images, labels = torch.randn(batch, 3, size, size), torch.randint(100, (batch,))
    return Model(name, module, lambda: F.cross_entropy(module(images), labels))


def unet(small: bool) -> Model:
    size, first = (32, 8) if small else (128, 24)
    module = UNet(tuple(first << stage for stage in range(4)))
    images, noise = torch.randn(4, 3, size, size), torch.randn(4, 3, size, size)
    return Model("U-Net", module, lambda: F.mse_loss(module(images), noise))


MODELS: dict[str, Callable[[bool], Model]] = {
    "GPT": gpt,
    "Llama": llama,
    "ViT": vision_transformer,
    "ResNet": resnet,
    "U-Net": unet,
    "T5": t5,
    "MoE": mixture,
    "Mamba": mamba,
}


def make(name: str, small: bool) -> Model:
    """Makes a model of `MODELS`, always with the same weights and batch; `small`: a tiny one."""
    torch.manual_seed(0)
    model = MODELS[name](small)
    model.module.train()
    return model
