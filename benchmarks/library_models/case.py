"""A model of a library, and how the library checkpoints it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Own = str | dict[str, Any] | Callable[[Any], Any] | None
Batch = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A model of a library.

    Attributes:
        library: name of the package.
        name: name of the model.
        make: builds the model; arguments: the library's module, and keywords from `own`.
        batch: makes a batch: positional arguments as a tuple, or keyword arguments as a dictionary.
        own: how to enable the library's checkpointing: the name of a method of the model, keywords
            of `make`, or a function of the model; None if the library has none.
        why: if ebb frees too little, the reason.
    """

    library: str
    name: str
    make: Callable[..., nn.Module]
    batch: Batch
    own: Own = None
    why: str = ""

    def build(self, with_own: bool) -> nn.Module:
        torch.manual_seed(0)
        library = importlib.import_module(MODULES.get(self.library, self.library))
        keywords = self.own if with_own and isinstance(self.own, dict) else {}
        model = self.make(library, **keywords).train()
        if with_own and isinstance(self.own, str):
            getattr(model, self.own)()
        elif with_own and callable(self.own):
            self.own(model)
        return model


MODULES = {
    "torch": "torch.nn",
    "open_clip_torch": "open_clip",
    "segmentation-models-pytorch": "segmentation_models_pytorch",
    "sentence-transformers": "sentence_transformers",
    "x-transformers": "x_transformers",
    "vit-pytorch": "vit_pytorch",
    "torch_geometric": "torch_geometric.nn",
    "denoising-diffusion-pytorch": "denoising_diffusion_pytorch",
    "neuraloperator": "neuralop.models",
    "efficientnet-pytorch": "efficientnet_pytorch",
    "monai": "monai.networks.nets",
    "lightning": "lightning.pytorch.demos.transformer",
    "torchaudio": "torchaudio.models",
    "kornia": "kornia.models.vit",
}
CASES: list[Case] = []
# The reason if a library checkpoints larger units than ebb's blocks.
LARGER = (
    "the library checkpoints {} as one unit, which holds less; recomputing the unit at once gives "
    "it a higher peak"
)


def add(
    library: str, name: str, make: Callable[..., Any], batch: Batch, own: Own = None, why: str = ""
) -> None:
    CASES.append(Case(library, name, make, batch, own, why))


def images(count: int, size: int, channels: int = 3) -> Batch:
    return lambda: (torch.randn(count, channels, size, size),)


def noise(*shape: int) -> Batch:
    return lambda: (torch.randn(shape),)


def words(count: int, length: int, vocabulary: int = 100) -> Batch:
    return lambda: (torch.randint(vocabulary, (count, length)),)


def steps(count: int = 2) -> Tensor:
    return torch.randint(1000, (count,))
