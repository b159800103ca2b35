"""Making modules regions."""

from __future__ import annotations

import abc
import copy
import functools
import gc
import inspect
import pickle
import weakref
from typing import Generic, TypeVar

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import ebb
from ebb_tests.exactness import same_bits
from ebb_tests.programs.layered_model import Layer, Model, entered, grads, same


@pytest.fixture
def model() -> Model:
    return Model()


def test_each_matching_module_is_a_region(model):
    expected = grads(model)

    handle = ebb.apply(model, ebb.policies.recompute_all, modules="layers.[0-9]")

    assert handle.names == ("layers.0", "layers.1", "layers.2")
    assert same(grads(model), expected)
    assert entered() == {"layers.0", "layers.1", "layers.2"}
    assert ebb.stats()["total"]["ops_replayed"] > 0


def test_nested_matches_count_once(model):
    handle = ebb.apply(model, modules="layers.*")  # matches layers.0.mlp too

    assert handle.names == ("layers.0", "layers.1", "layers.2")


@pytest.mark.not_sanitized
def test_the_blocks_of_a_model_are_the_default():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 8), torch.randn(8, 32, 32)
    peaks = []

    for modules in (None, ""):
        model.zero_grad()
        with ebb.apply(model, modules=modules) as handle:
            found = ebb.profile(lambda: model(x).square().mean().backward())
        peaks.append(found.peak)
        assert handle.names == (("",) if modules == "" else tuple(f"layers.{i}" for i in range(8)))

    assert peaks[0] < 0.3 * peaks[1]


def test_a_model_without_blocks_is_refused_unless_it_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    with pytest.raises(ValueError, match=r"Sequential has no blocks.*pass modules=\"\""):
        ebb.apply(model)
    assert type(model) is nn.Sequential
    with ebb.apply(model, modules="") as handle:
        assert handle.names == ("",)


def test_the_only_layer_of_a_model_with_other_parts_is_a_block():
    class OneLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer()])
            self.head = nn.Linear(4, 4)

    with ebb.apply(OneLayer()) as handle:
        assert handle.names == ("layers.0",)


def test_a_list_of_modules_stands_for_those_in_it():
    inner = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ModuleList([nn.Linear(2, 2)])})
    model = nn.ModuleDict({"layers": nn.ModuleList([inner, nn.Linear(2, 2)])})

    for modules in ("layers", "*layers*", "*"):
        with ebb.apply(model, modules=modules) as handle:
            assert handle.names == ("layers.0.a", "layers.0.b.0", "layers.1")


def test_several_patterns_and_the_model_itself(model):
    assert ebb.apply(model, modules=["*.mlp", "*.norm"]).names == tuple(
        f"layers.{i}.{name}" for i in range(3) for name in ("norm", "mlp")
    )
    other = Model()
    assert ebb.apply(other, modules="").names == ("",)
    grads(other)
    assert "Model" in entered()


def test_remove_gives_the_forward_back(model):
    before = dict(model.layers[0].__dict__)
    with ebb.apply(model, modules="layers.*") as handle:
        grads(model)
        assert entered()

    assert model.layers[0].__dict__ == before
    assert type(model.layers[0]) is Layer
    ebb.reset_stats()
    grads(model)
    assert entered() == set()
    handle.remove()
    assert type(model.layers[0]) is Layer


def test_an_instances_own_forward_is_kept(model):
    layer = model.layers[0]
    calls = []
    own = lambda x, scale=1.0: calls.append(1) or type(layer).forward(layer, x, scale)  # noqa: E731
    layer.forward = own

    handle = ebb.apply(model, modules="layers.0")
    grads(model)
    assert calls == [1]
    handle.remove()
    assert layer.forward is own


def test_remove_refuses_when_somebody_wrapped_the_forward_since(model):
    handle = ebb.apply(model, modules="layers.0")
    ours = model.layers[0].forward
    model.layers[0].forward = lambda *a, **k: ours(*a, **k)
    with pytest.raises(RuntimeError, match=r"'layers.0' was replaced"):
        handle.remove()

    del model.layers[0].forward
    handle.remove()
    assert type(model.layers[0]) is Layer


def test_to_others_the_model_looks_as_before(model):
    keys = list(model.state_dict())
    names = [name for name, _ in model.named_modules()]
    layer, seen = model.layers[0], []
    layer.register_forward_hook(lambda *args: seen.append(1))
    ebb.apply(model, modules="layers.*")

    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == names
    model.load_state_dict(Model().state_dict())
    assert isinstance(layer, Layer)
    assert type(layer).__name__ == "Layer"
    assert repr(model) == repr(Model())
    assert list(inspect.signature(layer.forward).parameters) == ["x", "scale"]
    grads(model)
    assert seen == [1]


def test_exception_in_forward_closes_the_region(model):
    ebb.apply(model, modules="layers.*")
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))

    assert ebb.stats()["open_regions"] == 0
    grads(model)


def test_no_match_gives_the_module_names(model):
    with pytest.raises(ValueError, match=r"no module matches 'blocks.*'.*layers.0.norm"):
        ebb.apply(model, modules="blocks.*")


def test_applied_twice(model):
    ebb.apply(model, modules="layers.*")
    with pytest.raises(ValueError, match=r"'layers.1' is already a region"):
        ebb.apply(model, modules="layers.1")


def test_wrong_types(model):
    with pytest.raises(TypeError, match=r"must be an ebb.Policy"):
        ebb.apply(model, "save_all")
    with pytest.raises(TypeError, match="modules must be"):
        ebb.apply(model, modules=[1])
    assert "forward" not in model.__dict__


# What happens to a module while its class is ebb's


def test_what_is_put_on_a_regions_class_goes_to_its_own_class():
    class Linear(torch.nn.Linear):
        pass

    x = torch.randn(3, 4)
    module = Linear(4, 4)
    expected = module(x).sin()
    handle = ebb.apply(module, modules="")
    type(module).forward = lambda self, x: torch.nn.functional.linear(
        x, self.weight, self.bias
    ).sin()
    assert torch.equal(module(x), expected)
    handle.remove()
    assert torch.equal(module(x), expected)


def test_parametrizations_may_change():
    class Sine(torch.nn.Module):
        def forward(self, x):
            return x.sin()

    x = torch.randn(3, 4)
    module = parametrizations.weight_norm(torch.nn.Linear(4, 4))
    handle = ebb.apply(module, modules="")
    parametrize.register_parametrization(module, "bias", Sine())
    expected = module(x)
    handle.remove()
    assert torch.equal(module(x), expected)
    handle = ebb.apply(module, modules="")
    parametrize.remove_parametrizations(module, "weight")
    assert torch.equal(module(x), expected)


def test_graph_modules():
    x = torch.randn(3, 4)
    module = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
    expected = module(x)
    with ebb.apply(module, modules=""):
        assert torch.equal(pickle.loads(pickle.dumps(module))(x), expected)
        assert torch.equal(module(x), expected)
        module.recompile()
        assert torch.equal(module(x), expected)


def test_forwards_that_take_no_self():
    class Static(torch.nn.Module):
        forward = staticmethod(torch.nn.functional.gelu)

    class Class(torch.nn.Module):
        @classmethod
        def forward(cls, x):
            return x.sin()

    class Builtin(torch.nn.Module):
        forward = torch.relu

    x = torch.randn(3, 4)
    for kind in (Static, Class, Builtin):
        module = kind()
        expected = module(x)
        with ebb.apply(module, modules=""):
            assert torch.equal(module(x), expected)


def test_lazy_modules_are_refused_until_they_have_shapes():
    model = torch.nn.Sequential(torch.nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"'0' is a lazy module .* run one forward"):
        ebb.apply(model, modules="0")
    model(torch.randn(3, 4))
    ebb.apply(model, modules="0").remove()


def test_classes_that_look_at_their_subclasses():
    seen = []

    class Base(torch.nn.Module):
        def __init_subclass__(cls, *, key):
            seen.append(key)

    class Named(Base, key="named"):
        def forward(self, x):
            return x

    ebb.apply(Named(), modules="").remove()
    assert seen == ["named"]


def test_modules_that_a_function_tells():
    model = Model()
    handle = ebb.apply(model, modules=lambda m, _: isinstance(m, Layer | nn.LayerNorm))
    assert handle.names == ("layers.0", "layers.1", "layers.2")
    handle.remove()

    def nothing(module, name):
        return False

    with pytest.raises(ValueError, match=r"no module matches the function 'nothing'"):
        ebb.apply(model, modules=nothing)
    with pytest.raises(TypeError, match="a function of a module and its name"):
        ebb.apply(model, modules=lambda module: True)


def test_a_function_is_told_names_without_the_parts_of_wrappers():
    model = torch.nn.Sequential(torch.compile(Model()))
    seen = set()
    with pytest.raises(ValueError, match="no module matches"):
        ebb.apply(model, modules=lambda _, name: seen.add(name))
    assert "0.layers.1" in seen
    assert not any("_orig_mod" in name for name in seen)


class ThatWrapsItself(torch.nn.Linear):
    """As transformers' layers: a wrapper per class, of which the outermost does something."""

    def __init_subclass__(cls):
        inner = cls.forward

        @functools.wraps(inner)
        def forward(self, *inputs):
            return inner(self, *inputs) * (2 if type(self).forward is forward else 1)

        cls.forward = forward


class WrappedByItsBase(ThatWrapsItself):
    def forward(self, x):
        return super().forward(x).relu()


@pytest.mark.parametrize("subclass_later", [False, True])
def test_a_class_that_compares_its_forward_with_its_own(subclass_later):
    layer = WrappedByItsBase(4, 4)
    x = torch.randn(4, 4, requires_grad=True)
    expected = torch.autograd.grad(layer(x).sum(), x)
    with ebb.apply(layer, modules=""):
        if subclass_later:  # as fully_shard does
            layer.__class__ = type("FSDPLayer", (type(layer),), {})
        ebb.reset_stats()
        found = torch.autograd.grad(layer(x).sum(), x)
        assert same_bits(found[0], expected[0])
        assert "WrappedByItsBase" in ebb.stats()["regions"]
        if subclass_later:
            layer.__class__ = type(layer).__mro__[1]


def test_remove_takes_the_numbers_of_modules_away_too():
    model = Model()
    rule = ebb.Policy([ebb.Rule("aten::addmm", ebb.SAVE, module="*mlp*")])
    kinds = [type(m) for m in model.modules()]
    first = ebb.apply(model, rule, "layers.0")
    second = ebb.apply(model, rule, "layers.1")
    first.remove()
    assert any("_ebb_original" in type(m).__dict__ for m in model.modules())
    second.remove()
    assert [type(m) for m in model.modules()] == kinds


class OneLayer(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)


class Abstract(abc.ABC, OneLayer):
    """As the modules of sentence-transformers: the first base makes no instance dictionary."""


class Typed(Generic[TypeVar("Tensors")], OneLayer):
    pass


class Mixed(OneLayer, abc.ABC):
    pass


@pytest.mark.parametrize("kind", [Abstract, Typed, Mixed])
def test_classes_with_a_base_that_is_no_module(kind):
    model = kind()

    handle = ebb.apply(model, modules="")

    assert type(model).__bases__ == (kind,)
    model(torch.randn(2, 4)).sum().backward()
    assert type(pickle.loads(pickle.dumps(model))) is kind
    assert type(copy.deepcopy(model)) is type(model)
    handle.remove()
    assert type(model) is kind


def test_remove_restores_copy_without_handle():
    model = nn.Sequential(Layer(4), Layer(4))
    handle = ebb.apply(model, ebb.Policy({}, default=ebb.RECOMPUTE), modules="[01]")
    twin = copy.deepcopy(model)

    assert ebb.remove(twin) == ("0", "1")

    assert type(twin[0]) is Layer
    assert ebb.remove(twin) == ()
    assert ebb.apply(twin, modules="0").names == ("0",)  # may be a region again
    with pytest.raises(ValueError, match=r"'0' is already a region.*ebb\.remove"):
        ebb.apply(model, modules="0")  # the original still has its regions
    handle.remove()
    assert type(model[0]) is Layer


def test_handle_after_remove_leaves_newer_regions():
    model = nn.Sequential(Layer(4), Layer(4))
    rule = ebb.Policy([ebb.Rule("aten::*", ebb.SAVE, module="1")], default=ebb.RECOMPUTE)
    old = ebb.apply(model, rule, modules="[01]")
    ebb.remove(model)
    assert type(model[1]) is Layer
    new = ebb.apply(model, rule, modules="[01]")

    old.remove()

    before = ebb.stats()["total"]["bytes_saved"]
    model(torch.randn(2, 4)).sum().backward()
    assert ebb.stats()["total"]["bytes_saved"] > before  # the rule of module 1 still has effect
    new.remove()
    assert type(model[1]) is Layer
    newest = ebb.apply(model, rule, modules="[01]")
    old.remove()
    assert type(model[1]) is not Layer
    newest.remove()


def test_remove_changes_nothing_if_forward_was_wrapped():
    model = nn.Sequential(Layer(4), Layer(4))
    ebb.apply(model, modules="[01]")
    inner = model[1].forward
    model[1].forward = lambda x: inner(x)

    with pytest.raises(RuntimeError, match=r"module '1' was replaced after ebb\.apply"):
        ebb.remove(model)

    assert type(model[0]) is not Layer
    del model[1].forward
    assert ebb.remove(model) == ("0", "1")


@pytest.mark.parametrize(
    ("modules", "error", "message"),
    [
        (nn.Linear(2, 2), TypeError, "not a module; pass its name"),
        ([], ValueError, "modules is empty"),
    ],
)
def test_invalid_modules_raise(modules, error, message):
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(error, match=message):
        ebb.apply(model, modules=modules)
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        ebb.remove("model")


def test_a_handle_keeps_no_model_after_remove():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    handle = ebb.apply(model, ebb.Policy([ebb.Rule("*", ebb.SAVE, module="0")]), modules="*")
    handle.remove()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert handle.names == ("",)
