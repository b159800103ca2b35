"""Modules that `find_blocks` takes for the blocks of a model."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from ebb._region.blocks import find_blocks
from ebb._support.names import in_ranges


def holder(**parts):
    model = nn.Module()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


class Convolution(nn.Sequential):
    def __init__(self, inside, outside):
        super().__init__(nn.Conv2d(inside, outside, 3), nn.BatchNorm2d(outside), nn.ReLU())


class Attention(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        return x


class Layer(nn.Module):
    def __init__(self, width=4, experts=0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        if experts:
            self.router = nn.Linear(width, experts)
            self.experts = nn.ModuleList(Mlp(width) for _ in range(experts))
        else:
            self.mlp = Mlp(width)

    def forward(self, x):
        return x


class Mlp(nn.Sequential):
    def __init__(self, width=4):
        super().__init__(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


class Residual(nn.Module):
    """As in a ResNet: the first of a stage has one layer more."""

    def __init__(self, inside, outside):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3)
        self.downsample = nn.Sequential()
        if inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1), nn.BatchNorm2d(outside))

    def forward(self, x):
        return x


class Inverted(nn.Module):
    """As in MobileNets: a list of small units inside of a block."""

    def __init__(self, inside, outside):
        super().__init__()
        self.block = nn.Sequential(
            Convolution(inside, 8),
            Convolution(8, 8),
            nn.Sequential(nn.Conv2d(8, 2, 1), nn.ReLU(), nn.Conv2d(2, 8, 1), nn.Sigmoid()),
            Convolution(8, outside),
        )

    def forward(self, x):
        return x


class Alone(nn.Module):
    """Without modules inside."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        return x @ self.weight


class Merging(nn.Module):
    """As between the stages of Swin."""

    def __init__(self):
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.reduction(self.norm(x))


class Chained(nn.Module):
    """As in MONAI's DynUNet, where modules of a chain hold the next one."""

    def __init__(self, block, after):
        super().__init__()
        self.block, self.after = block, after

    def forward(self, x):
        return self.after(self.block(x))


class Connected(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.ReLU())


def layers(*experts):
    """A layer for each number of experts."""
    return nn.ModuleList(Layer(experts=count) for count in experts)


def stages():
    pairs = [nn.ModuleList(Layer(width) for _ in range(2)) for width in (4, 8)]
    return nn.ModuleList(holder(blocks=pair, after=Merging()) for pair in pairs)


def stage(block, *widths):
    return nn.Sequential(*(block(a, b) for a, b in itertools.pairwise(widths)))


def double(inside, outside):
    return stage(Convolution, inside, outside, outside)


def chained(*order):
    """A chain of modules that a list holds, too."""
    downs = layers(0, 0, 0)
    parts = {"downs": downs, "chain": Chained(downs[0], Chained(downs[1], downs[2]))}
    return holder(**{name: parts[name] for name in order})


def shared():
    layer = Layer()
    return holder(layers=nn.ModuleList([layer, layer, Layer()]))


def normalized():
    return nn.Sequential(*(parametrizations.weight_norm(nn.Linear(2, 2)) for _ in range(2)))


MODELS = {
    "transformer": (
        lambda: holder(embed=nn.Embedding(4, 4), h=layers(0, 0, 0), head=nn.Linear(4, 4)),
        ["h.0-2"],
    ),
    "encoder and decoder": (
        lambda: nn.Transformer(4, 2, 2, 3, 4),
        ["encoder.layers.0-1", "decoder.layers.0-2"],
    ),
    "one layer": (lambda: holder(layers=layers(0)), ["layers.0"]),
    "one layer each": (
        lambda: nn.Transformer(4, 2, 1, 1, 4),
        ["encoder.layers.0", "decoder.layers.0"],
    ),
    "experts": (lambda: holder(layers=layers(3, 3)), ["layers.0-1"]),
    "experts in one layer": (lambda: holder(layers=layers(0, 3)), ["layers.0-1"]),
    "experts in the only layer": (lambda: holder(layers=layers(3)), ["layers.0"]),
    "layers of two kinds": (
        lambda: holder(layers=nn.ModuleList([Layer(), nn.Sequential(Mlp(), Attention()), Layer()])),
        ["layers.0-2"],
    ),
    "lists in a list": (
        lambda: holder(layers=nn.ModuleList(nn.ModuleList([Attention(), Mlp()]) for _ in range(3))),
        ["layers.0-2.0-1"],
    ),
    "head with parts": (
        lambda: holder(embed=holder(words=nn.Embedding(4, 4)), layers=layers(0, 0), head=Mlp()),
        ["layers.0-1", "head"],
    ),
    # Parts of one layer are blocks: their normalization and activation are freed.
    "parts of one layer": (
        lambda: holder(stem=Merging(), norm=nn.LayerNorm(4), stages=stages()),
        ["stem", "stages.0-1.blocks.0-1", "stages.0-1.after"],
    ),
    "list before its chain": (lambda: chained("downs", "chain"), ["downs.0-2"]),
    "chain before its list": (
        lambda: chained("chain", "downs"),
        ["chain.block", "chain.after.block", "chain.after.after"],
    ),
    # A recurrent layer saves results of each time step, unlike a Linear.
    "recurrent layer": (
        lambda: holder(fc1=Connected(), fc2=Connected(), rnn=nn.LSTM(4, 4), out=nn.Linear(4, 4)),
        ["fc1", "fc2", "rnn"],
    ),
    "stages": (
        lambda: holder(
            conv1=nn.Conv2d(3, 4, 3),
            layer1=stage(Residual, 4, 4, 4),
            layer2=stage(Residual, 4, 8, 8),
            fc=nn.Linear(8, 2),
        ),
        ["layer1.0-1", "layer2.0-1"],
    ),
    "stages in a list": (
        lambda: holder(
            features=nn.Sequential(
                Convolution(3, 4),
                stage(Residual, 4, 4, 4),
                Convolution(4, 8),
                stage(Residual, 8, 16, 16, 16),
                stage(Residual, 16, 32),
            )
        ),
        ["features.0,2,4", "features.1,3.0-2"],
    ),
    "units inside of blocks": (
        lambda: nn.Sequential(
            Convolution(3, 4),
            stage(Inverted, 4, 6),
            stage(Inverted, 6, 8, 8),
            stage(Inverted, 8, 9, 9),
        ),
        ["0-1", "2-3.0-1"],
    ),
    "unet": (
        lambda: holder(
            inc=double(3, 4),
            down1=double(4, 8),
            down2=double(8, 8),
            up1=double(8, 4),
            out=nn.Linear(1, 1),
        ),
        ["inc", "down1", "down2", "up1"],
    ),
    "wrapped": (lambda: holder(module=holder(layers=layers(0, 0))), ["module.layers.0-1"]),
    "data parallel": (
        lambda: nn.DataParallel(holder(layers=layers(0, 0))),
        ["module.layers.0-1"],
    ),
    # A Linear alone has nothing inside that could be freed.
    "sequential of layers": (Mlp, [""]),
    "sequential and loss": (lambda: holder(net=Mlp(), loss=nn.MSELoss()), ["net"]),
    "sequentials": (lambda: nn.Sequential(*(Connected() for _ in range(3))), ["0-2"]),
    "no repetition": (
        lambda: holder(features=Convolution(3, 4), classifier=Mlp()),
        ["features", "classifier"],
    ),
    "modules without parts": (lambda: nn.Sequential(Alone(), Alone()), ["0-1"]),
    "modules without parts, and a linear": (
        lambda: nn.Sequential(nn.Linear(2, 2), Alone(), Alone()),
        [""],
    ),
    "module without parts": (Alone, [""]),
    "activation": (nn.ReLU, [""]),
    "parametrizations": (normalized, [""]),
    "shared layer": (shared, ["layers.0,2"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_models(name):
    make, expected = MODELS[name]
    model = make()

    found = find_blocks(model)

    assert in_ranges(found) == expected
    assert list(found) == [name for name, _ in model.named_modules() if name in found]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("Llama", ["model.layers.0-1"]),
        ("Mixtral", ["model.layers.0-1"]),
        ("DeepSeek-V3", ["model.layers.0-1"]),
        ("GPT-2", ["transformer.h.0-1"]),
        ("BERT", ["bert.encoder.layer.0-1", "cls"]),
        ("T5", ["encoder.block.0-1", "decoder.block.0-1"]),
        ("ViT", None),  # the name differs between releases
        ("ConvNeXt", ["convnext.embeddings", "convnext.encoder.stages.0-1.layers.0-1"]),
        ("Mamba", ["backbone.layers.0-1"]),
    ],
)
def test_blocks_of_models_of_transformers_library(family, expected):
    models = pytest.importorskip("ebb_tests.programs.real_models", exc_type=ImportError)

    found = in_ranges(find_blocks(models.HUGGING_FACE[family].build()))

    assert found == expected if expected else found[0] == "vit.embeddings" and len(found) == 2
