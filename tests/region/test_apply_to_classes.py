"""`ebb.apply` to modules whose classes have bases that are no modules."""

from __future__ import annotations

import abc
import copy
import pickle
from typing import Generic, TypeVar

import pytest
import torch
from torch import nn

import ebb


class Model(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)


class Abstract(abc.ABC, Model):
    """As the modules of sentence-transformers: the first base makes no instance dictionary."""


class Typed(Generic[TypeVar("Tensors")], Model):
    pass


class Mixed(Model, abc.ABC):
    pass


@pytest.mark.parametrize("kind", [Abstract, Typed, Mixed])
def test_classes_with_a_first_base_that_is_no_module(kind):
    model = kind()

    handle = ebb.apply(model, modules="")

    assert type(model).__bases__ == (kind,)
    model(torch.randn(2, 4)).sum().backward()
    assert type(pickle.loads(pickle.dumps(model))) is kind
    assert type(copy.deepcopy(model)) is type(model)
    handle.remove()
    assert type(model) is kind
