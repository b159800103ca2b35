"""Rules that ask for a module."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

import ebb
from ebb import _testing
from ebb_tests import fork_server
from ebb_tests.bytes_saved import Block, saved
from ebb_tests.exactness import same_bits
from ebb_tests.other_threads import in_thread


def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


@pytest.fixture
def net():
    return model()


@pytest.fixture
def x():
    return torch.randn(2, 4, requires_grad=True)


def in_modules(pattern, op="aten::addmm"):
    return ebb.Policy([ebb.Rule(op, ebb.SAVE, module=pattern)])


def kept_by(net, x):
    ebb.reset_stats()
    found = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    return ebb.stats()["total"]["bytes_packed"], found


# Outputs of addmm that somebody saves: each `up` for `act`, each `down` for the sine.
PATTERNS = [("*.up", 2), ("0.*", 2), ("1", 0), ("*.act", 0), ("*", 4), ("?.down", 2)]


@pytest.mark.parametrize(("pattern", "outputs"), PATTERNS)
def test_modules_under_apply(pattern, outputs):
    net, x = model(), torch.randn(2, 4)
    expected = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    with ebb.apply(net, in_modules(pattern), modules="[01]"):
        nbytes, found = kept_by(net, x)
    assert nbytes == 32 * outputs
    assert all(map(same_bits, found, expected))


@pytest.mark.parametrize(("pattern", "outputs"), PATTERNS)
def test_modules_in_a_region_with_a_root(pattern, outputs, net, x):
    assert saved(in_modules(pattern), net, x, root=net) == 32 * outputs
    assert saved(in_modules(pattern), net, x, root=net) == 32 * outputs


def test_the_innermost_module_counts(net, x):
    in_a_block = ebb.Policy([ebb.Rule("aten::sin", ebb.SAVE, module="0")])
    assert saved(in_a_block, lambda x: net(x.sin().sin()).sin(), x, root=net) == 0
    in_the_root = ebb.Policy([ebb.Rule("aten::*", ebb.SAVE, module="0.act")])
    assert saved(in_the_root, net, x, root=net) == 32  # what gelu made, for `down`


def test_calls_per_module(net, x):
    def program(x):
        return net(net(x))

    first = ebb.Policy([ebb.Rule("aten::addmm", ebb.SAVE, nth=1)])
    each = ebb.Policy([ebb.Rule("aten::addmm", ebb.SAVE, nth=1, per_module=True)])
    second = ebb.Policy([ebb.Rule("aten::addmm", ebb.SAVE, every=2, per_module=True)])
    assert saved(first, program, x, root=net) == 32
    assert saved(each, program, x, root=net) == 4 * 32
    assert saved(second, program, x, root=net) == 4 * 32


def test_a_module_that_raises_is_left(x):
    class Fails(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    net = nn.ModuleDict({"fails": Fails(), "linear": nn.Linear(4, 4)})

    def program(x):
        with pytest.raises(ZeroDivisionError):
            net["fails"](x)
        return net["linear"](x.sin().sin())

    rule = ebb.Rule("aten::sin", ebb.SAVE, module="fails")
    assert saved([rule], program, x, root=net) == 0


def test_partial_functions_and_bound_methods(net, x):
    for function in (functools.partial(net.forward), net.forward, functools.partial(net)):
        assert saved(in_modules("0.*"), function, x, root=net) == 64


def test_names_leave_out_wrappers(net, x):
    class LoraLinear(nn.Module):  # as PEFT's
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer
            self.lora_A = nn.Linear(4, 2, bias=False)
            self.lora_B = nn.Linear(2, 4, bias=False)

        def forward(self, x):
            return self.base_layer(x) + self.lora_B(self.lora_A(x))

    net[0].up = LoraLinear(net[0].up)
    net[1].down = CheckpointWrapper(net[1].down)  # type: ignore[no-untyped-call]
    rule = ebb.Policy([ebb.Rule("aten::addmm", ebb.SAVE, module="0.up")])
    with ebb.region(rule, root=net):
        names = [
            _testing.module_names(ebb._region.modules.marks_of(module).number)
            for module in (
                net[0].up.base_layer,
                net[0].up.lora_A,
                net[1].down._checkpoint_wrapped_module,
            )
        ]
    assert names == [
        ("0.up", "0.up.base_layer"),
        ("0.up.lora_A", "0.up.lora_A"),
        ("1.down", "1.down._checkpoint_wrapped_module"),
    ]
    assert saved(rule, net, x, root=net) >= 0


@pytest.mark.sweep
def test_compiled_submodules(net, x):
    net[0].act = torch.compile(net[0].act, backend="aot_eager")
    assert saved(in_modules("1.*"), net, x, root=net) == 64
    compiled = torch.compile(net[1], backend="aot_eager")
    expected = torch.autograd.grad(net[1](x).sum(), x)[0]
    with ebb.region(in_modules("*"), root=net):
        y = compiled(x)
    assert torch.allclose(torch.autograd.grad(y.sum(), x)[0], expected)


def test_threads_have_modules_of_their_own(net, x):
    found = []

    def look_from_another_thread(*_):
        found.append(in_thread(ebb._C.running_module))

    net[0].act.register_forward_pre_hook(look_from_another_thread)
    net[0].act.forward = net[0].act.forward  # somebody's own on the instance
    assert saved(in_modules("0.act", "aten::gelu"), net, x, root=net) == 32
    assert found == [0, 0]


def test_a_tracked_model_is_pickled_and_copied_as_before(net, x):
    saved(in_modules("*"), net, x, root=net)
    text = pickle.dumps(net)
    assert b"ebb" not in text.replace(b"ebb_tests", b"")
    assert type(pickle.loads(text)[0]) is Block
    twin = copy.deepcopy(net)
    assert saved(in_modules("0.*"), twin, x, root=twin) == 64
    assert isinstance(net[0], Block)
    assert list(net.state_dict()) == list(model().state_dict())


def test_modules_are_tracked_only_if_a_rule_asks(net):
    with ebb.region(ebb.policies.save_matmuls, root=net):
        pass
    assert all(ebb._region.modules.marks_of(module) is None for module in net.modules())


def test_remove_keeps_what_another_policy_tracks(net, x):
    saved(in_modules("*"), net, x, root=net)
    with ebb.apply(net, ebb.policies.save_all, modules="0"):
        assert ebb._region.modules.marks_of(net[0]).region is not None
    assert saved(in_modules("0.*"), net, x, root=net) == 64


def test_a_rule_for_modules_where_none_is_known_warns():
    program = (
        "import torch, ebb\n"
        "policy = ebb.Policy([ebb.Rule('aten::sin', ebb.SAVE, module='*.mlp')])\n"
        "with ebb.region(policy):\n"
        "    torch.ones(2).sin()\n"
    )
    done = fork_server.run(["-c", program])
    assert "rules with module= have no effect in this region" in done.stderr
