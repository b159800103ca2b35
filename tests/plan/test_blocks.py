"""Which modules of a model that nobody described are its blocks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from ebb._region.blocks import find_blocks
from ebb._support.names import in_ranges


def blocks(model):
    """As short as names can be written."""
    return in_ranges(find_blocks(model))


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


def layers(*settings):
    return nn.ModuleList(Layer(**one) for one in settings)


def test_layers_of_a_transformer():
    model = holder(embed=nn.Embedding(4, 4), h=layers({}, {}, {}), head=nn.Linear(4, 4))

    assert find_blocks(model) == ("h.0", "h.1", "h.2")


def test_encoder_and_decoder():
    assert blocks(nn.Transformer(4, 2, 2, 3, 4)) == ["encoder.layers.0-1", "decoder.layers.0-2"]


def test_a_single_layer():
    assert blocks(holder(layers=layers({}))) == ["layers.0"]
    assert blocks(nn.Transformer(4, 2, 1, 1, 4)) == ["encoder.layers.0", "decoder.layers.0"]


def test_experts_are_no_blocks():
    assert blocks(holder(layers=layers({"experts": 3}, {"experts": 3}))) == ["layers.0-1"]
    assert blocks(holder(layers=layers({}, {"experts": 3}))) == ["layers.0-1"]
    assert blocks(holder(layers=layers({"experts": 3}))) == ["layers.0"]


def test_layers_of_several_kinds():
    mixed = nn.ModuleList([Layer(), nn.Sequential(Mlp(), Attention()), Layer()])

    assert blocks(holder(layers=mixed)) == ["layers.0-2"]


def test_lists_in_lists_that_have_no_forward():
    pairs = nn.ModuleList(nn.ModuleList([Attention(), Mlp()]) for _ in range(3))

    assert blocks(holder(layers=pairs)) == ["layers.0-2.0-1"]


def test_a_head_that_is_made_of_parts_is_taken_too():
    model = holder(embed=holder(words=nn.Embedding(4, 4)), layers=layers({}, {}), head=Mlp())

    assert blocks(model) == ["layers.0-1", "head"]


class Merging(nn.Module):
    """As between the stages of Swin."""

    def __init__(self):
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.reduction(self.norm(x))


def test_parts_of_one_layer_are_taken_too():
    """Their normalization and activation are freed."""
    stages = [holder(blocks=layers({"width": w}, {"width": w}), after=Merging()) for w in (4, 8)]
    model = holder(stem=Merging(), norm=nn.LayerNorm(4), stages=nn.ModuleList(stages))

    assert blocks(model) == ["stem", "stages.0-1.blocks.0-1", "stages.0-1.after"]


def test_a_part_that_holds_the_blocks_of_a_list_again_is_no_block():
    """As in MONAI's DynUNet, where modules of a chain hold the next one."""

    class Chained(nn.Module):
        def __init__(self, block, after):
            super().__init__()
            self.block, self.after = block, after

        def forward(self, x):
            return self.after(self.block(x))

    downsamples = layers({}, {}, {})
    chain = Chained(downsamples[0], Chained(downsamples[1], downsamples[2]))

    assert blocks(holder(downsamples=downsamples, chain=chain)) == ["downsamples.0-2"]
    assert blocks(holder(chain=chain, downsamples=downsamples)) == [
        "chain.block",
        "chain.after.block",
        "chain.after.after",
    ]


def test_recurrent_layers_are_blocks():
    """One keeps what each time step makes, unlike a Linear."""

    class Connected(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(4, 4), nn.ReLU())

    model = holder(fc1=Connected(), fc2=Connected(), rnn=nn.LSTM(4, 4), out=nn.Linear(4, 4))

    assert find_blocks(model) == ("fc1", "fc2", "rnn")


def stage(block, *widths):
    return nn.Sequential(*(block(a, b) for a, b in itertools.pairwise(widths)))


def test_blocks_of_stages():
    model = holder(
        conv1=nn.Conv2d(3, 4, 3),
        layer1=stage(Residual, 4, 4, 4),
        layer2=stage(Residual, 4, 8, 8),
        fc=nn.Linear(8, 2),
    )

    assert find_blocks(model) == ("layer1.0", "layer1.1", "layer2.0", "layer2.1")


def test_blocks_of_stages_in_a_list():
    stages = nn.Sequential(
        Convolution(3, 4),
        stage(Residual, 4, 4, 4),
        Convolution(4, 8),
        stage(Residual, 8, 16, 16, 16),
        stage(Residual, 16, 32),
    )

    found = find_blocks(holder(features=stages))

    names = ("0", "1.0", "1.1", "2", "3.0", "3.1", "3.2", "4")
    assert found == tuple(f"features.{name}" for name in names)


def test_small_units_inside_of_blocks_are_no_blocks():
    features = nn.Sequential(
        Convolution(3, 4), stage(Inverted, 4, 6), stage(Inverted, 6, 8, 8), stage(Inverted, 8, 9, 9)
    )

    found = find_blocks(features)

    assert not [name for name in found if ".block" in name]
    assert {name.split(".")[0] for name in found} == {"0", "1", "2", "3"}


def test_a_unet():
    def double(inside, outside):
        return nn.Sequential(Convolution(inside, outside), Convolution(outside, outside))

    model = holder(
        inc=double(3, 4),
        down1=double(4, 8),
        down2=double(8, 8),
        up1=double(8, 4),
        out=nn.Linear(1, 1),
    )

    assert find_blocks(model) == ("inc", "down1", "down2", "up1")


def test_layers_that_are_wrapped():
    assert blocks(holder(module=holder(layers=layers({}, {})))) == ["module.layers.0-1"]
    assert blocks(torch.nn.DataParallel(holder(layers=layers({}, {})))) == ["module.layers.0-1"]


def test_a_sequential_of_layers_is_one_block():
    """A Linear by itself has nothing inside that could be given up."""
    assert find_blocks(Mlp()) == ("",)
    assert find_blocks(holder(net=Mlp(), loss=nn.MSELoss())) == ("net",)
    assert blocks(
        nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.GELU()) for _ in range(3)))
    ) == ["0-2"]


def test_parts_of_a_model_without_repetition():
    model = holder(features=Convolution(3, 4), classifier=Mlp())

    assert find_blocks(model) == ("features", "classifier")


def test_modules_without_parts():
    assert blocks(nn.Sequential(Alone(), Alone())) == ["0-1"]
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), Alone(), Alone())) == ("",)
    assert find_blocks(Alone()) == ("",)
    assert find_blocks(nn.ReLU()) == ("",)


def test_parametrizations_are_no_parts():
    model = nn.Sequential(*(parametrizations.weight_norm(nn.Linear(2, 2)) for _ in range(2)))

    assert find_blocks(model) == ("",)


def test_a_shared_module_is_named_once():
    layer = Layer()

    assert find_blocks(holder(layers=nn.ModuleList([layer, layer, Layer()]))) == (
        "layers.0",
        "layers.2",
    )


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
def test_models_of_transformers(family, expected):
    families = pytest.importorskip("real_models").HUGGING_FACE

    found = blocks(families[family].build())

    assert found == expected if expected else found[0] == "vit.embeddings" and len(found) == 2
