"""Copies and pickles of modules that are regions."""

from __future__ import annotations

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import ebb
from ebb_tests.programs.layered_model import Layer, Model, entered, grads, same


@pytest.fixture
def model() -> Model:
    return Model()


def test_shallow_copies_and_replicas_use_their_own_parameters(model):
    layer = model.layers[0].eval()
    ebb.apply(layer, modules="")
    x = torch.ones(2, 4)
    for twin in (copy.copy(layer), layer._replicate_for_data_parallel()):
        twin.__dict__["_modules"] = dict(twin._modules)  # copy.copy shares the dictionary
        twin.norm = nn.LayerNorm(4)
        twin.norm.weight.data.fill_(3)
        twin.norm.bias.data.fill_(2)
        expected = x + twin.mlp(twin.norm(x))
        ebb.reset_stats()
        assert torch.equal(twin(x), expected)
        assert ebb.stats()["total"]["entered"] == 1
        assert not torch.equal(layer(x), expected)


def test_deepcopy_is_a_region_of_its_own(model):
    expected = grads(model)
    handle = ebb.apply(model, modules="layers.*")
    twin = copy.deepcopy(model)
    handle.remove()

    ebb.reset_stats()
    assert same(grads(twin), expected)
    assert entered() == {"layers.0", "layers.1", "layers.2"}
    twin.layers[0].mlp[0].bias.data.fill_(2)
    assert not same(grads(twin), grads(model))


def test_pickle_carries_the_plain_forward(model):
    expected = grads(model)
    ebb.apply(model, modules="layers.*")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)

    for twin in (pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        ebb.reset_stats()
        assert same(grads(twin), expected)
        assert not entered()
    assert b"ebb" not in pickle.dumps(model).replace(b"ebb_tests", b"")


class Scaled(torch.nn.Module):
    """A wrapper that hands on what it has not."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "inner":
                raise
            return getattr(self.inner, name)

    def forward(self, x):
        return 3 * self.inner(x)


@pytest.mark.parametrize("both", [False, True])
def test_a_copy_of_a_wrapper_around_a_region_is_the_wrapper(both):
    x = torch.randn(3, 4)
    model = torch.nn.Sequential(Scaled(torch.nn.Linear(4, 4)))
    handles = [
        ebb.apply(model[0].inner, modules=""),
        *([ebb.apply(model, modules="0")] if both else []),
    ]
    for twin in (copy.deepcopy(model), copy.deepcopy(model[0]), copy.copy(model[0])):
        assert torch.equal(twin(x), model(x))
    assert list(dict(copy.deepcopy(model).named_parameters())) == ["0.inner.weight", "0.inner.bias"]
    for handle in handles[::-1]:
        handle.remove()


def test_a_copy_of_a_subclass_that_was_made_later():
    model = Layer().double()
    ebb.apply(model, modules="")
    base = type(model)

    def forward(self, x):
        return super(patched, self).forward(x) * 3

    patched = type("PatchedLayer", (base,), {"forward": forward})
    model.__class__ = patched
    model.eval()
    x = torch.randn(2, 4).double()
    for twin in (copy.deepcopy(model), copy.copy(model)):
        assert type(twin) is type(model)
        assert torch.equal(twin(x), model(x))
        ebb.reset_stats()
        twin(x)
        assert ebb.stats()["total"]["entered"] == 1
        assert ebb._region.modules.marks_of(twin) is not ebb._region.modules.marks_of(model)


def test_an_instance_made_of_a_regions_class():
    model = Layer()
    ebb.apply(model, modules="")
    other = type(model)().eval()
    x = torch.randn(2, 4)
    for twin in (copy.copy(other), copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert torch.equal(twin(x), other(x))


class CallsDuringCopy(nn.Linear):
    """A block that calls `during` while Python copies or pickles the block."""

    during = None

    def __getstate__(self):
        CallsDuringCopy.during()
        return self.__dict__

    def forward(self, x):
        return super().forward(x).sin()


def in_another_thread(function):
    """Runs a function in another thread, and returns its result."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize("copying", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_model_is_a_region_in_other_threads_while_it_is_copied(monkeypatch, copying):
    model = CallsDuringCopy(4, 4)
    ebb.apply(model, modules="")
    entered_meanwhile = []

    def forward():
        ebb.reset_stats()
        model(torch.ones(2, 4))
        entered_meanwhile.append(ebb.stats()["total"]["entered"])

    monkeypatch.setattr(CallsDuringCopy, "during", lambda: in_another_thread(forward))
    copying(model)

    assert entered_meanwhile == [1]


@pytest.mark.parametrize("copying", [copy.deepcopy, copy.copy])
def test_two_threads_may_copy_a_model_at_once(monkeypatch, copying):
    model = CallsDuringCopy(4, 4)
    ebb.apply(model, modules="")
    twins = []

    def second():
        CallsDuringCopy.during = lambda: None
        twins.append(in_another_thread(lambda: copying(model)))

    monkeypatch.setattr(CallsDuringCopy, "during", second)
    twins.append(copying(model))

    for twin in twins:
        ebb.reset_stats()
        twin(torch.ones(2, 4))
        assert ebb.stats()["total"]["entered"] == 1


class CopiesItself(nn.Linear):
    """A block with a method for each of its copies. `kind` is the copy's class."""

    kind = None

    def __deepcopy__(self, memo):
        twin = (self.kind or type(self)).__new__(self.kind or type(self))
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    def __copy__(self):
        twin = (self.kind or type(self)).__new__(self.kind or type(self))
        twin.__dict__ = dict(self.__dict__)
        return twin


@pytest.mark.parametrize("copying", [copy.deepcopy, copy.copy])
@pytest.mark.parametrize("kind", [None, CopiesItself])
def test_a_copy_by_a_models_own_method_is_a_region(monkeypatch, copying, kind):
    monkeypatch.setattr(CopiesItself, "kind", kind)
    model = CopiesItself(4, 4)
    handle = ebb.apply(model, modules="")
    twin = copying(model)
    handle.remove()

    ebb.reset_stats()
    assert torch.equal(twin(torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert ebb.stats()["total"]["entered"] == 1


@pytest.mark.parametrize("copying", [copy.deepcopy, copy.copy])
def test_a_copy_of_a_graph_module_is_a_region(copying):
    module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with ebb.apply(module, modules=""):
        twin = copying(module)

    ebb.reset_stats()
    assert torch.equal(twin(torch.ones(2, 4)), module(torch.ones(2, 4)))
    assert ebb.stats()["total"]["entered"] == 1


def test_a_child_that_refers_to_its_parent_refers_to_the_copy_in_a_copy():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].__dict__["parent"] = model
    ebb.apply(model, modules=["", "0"])

    twin = copy.deepcopy(model)

    assert twin[0].__dict__["parent"] is twin


class PicklesByClass(nn.Linear):
    def __reduce__(self):
        return (type(self), (self.in_features, self.out_features))


class PicklesItsDictionary(nn.Linear):
    def __getstate__(self):
        return {"dictionary": self.__dict__}

    def __setstate__(self, state):
        self.__dict__.update(state["dictionary"])


@pytest.mark.parametrize("kind", [PicklesByClass, PicklesItsDictionary])
def test_the_pickle_of_a_region_names_its_own_class_and_no_module_of_ebb(kind):
    model = kind(4, 4)
    ebb.apply(model, modules="")

    text = pickle.dumps(model)

    assert b"ebb." not in text
    assert type(pickle.loads(text)) is kind
