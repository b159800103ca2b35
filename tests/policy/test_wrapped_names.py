"""Names of modules inside wrappers, with and without the wrappers' parts."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import ebb
from ebb._launch import models, takeover
from ebb._region.module_names import modules_of
from ebb_tests.bytes_saved import Block
from ebb_tests.exactness import same_bits


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Float16Module(nn.Module):
    """As Megatron-LM's."""

    def __init__(self, inner):
        super().__init__()
        self.module = inner

    def forward(self, x):
        return self.module(x)


def fsdp(module):
    return FullyShardedDataParallel(
        module, device_id=torch.device("cpu"), use_orig_params=True, ignored_states=[]
    )


WRAPPERS = {
    "compile": lambda module: torch.compile(module, backend="eager"),
    "ddp": DistributedDataParallel,
    "dp": DataParallel,
    "checkpoint": checkpoint_wrapper,
    "megatron": Float16Module,
    "fsdp": fsdp,
}
STACKS = [
    stack
    for length in (0, 1, 2, 3)
    for stack in itertools.permutations(WRAPPERS, length)
    # FSDP1 and DDP are not made to hold each other
    if not {"ddp", "fsdp"} <= set(stack)
]


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def without_warnings_of_torch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # FSDP1 and DDP, which have successors
        warnings.filterwarnings("ignore", r".*NO_SHARD.*")
        yield


def wrapped(stack, around_layers=()):
    """A network in these wrappers, the first outermost, and its layers."""
    net = Net()
    layers = list(net.layers)
    for i, layer in enumerate(layers):
        for wrapper in reversed(around_layers):
            layer = WRAPPERS[wrapper](layer)
        net.layers[i] = layer
    for wrapper in reversed(stack):
        net = WRAPPERS[wrapper](net)
    return net, layers


def gradients(net):
    x = torch.linspace(0, 1, 8).reshape(2, 4).requires_grad_()
    net.zero_grad()
    net(x).sum().backward()
    return [x.grad, *[p.grad for p in net.parameters()]]


@pytest.mark.parametrize("stack", STACKS, ids="-".join)
def test_plain_and_full_names_match_in_any_stack_of_wrappers(stack):
    net, layers = wrapped(stack)
    full = {module: name for name, module in net.named_modules()}

    for globs in ("layers.*", ["layers.0", "layers.1"], [full[layer] for layer in layers]):
        with ebb.apply(net, modules=globs) as handle:
            assert [net.get_submodule(name) for name in handle.names] == layers
    with ebb.apply(net, modules="layers.1.up") as handle:
        assert [net.get_submodule(name) for name in handle.names] == [layers[1].up]
    assert [named.plain for named in modules_of(net) if named.module in layers] == [
        "layers.0",
        "layers.1",
    ]


@pytest.mark.parametrize("around", [(), ("fsdp",), ("checkpoint",), ("compile", "checkpoint")])
@pytest.mark.parametrize("stack", [(), ("megatron",), ("fsdp",), ("dp", "checkpoint")])
def test_wrapped_layers_have_plain_names(stack, around):
    net, layers = wrapped(stack, around)

    with ebb.apply(net, modules="layers.?") as handle:
        assert len(handle.names) == 2
        for name, layer in zip(handle.names, layers, strict=True):
            assert layer in net.get_submodule(name).modules()


@pytest.mark.parametrize("stack", [("ddp",), ("fsdp",), ("dp",), ("ddp", "checkpoint")])
def test_wrapped_models_train_as_without_regions(stack):
    expected = gradients(wrapped(stack)[0])
    net, _ = wrapped(stack)

    with ebb.apply(net, modules="layers.*"):
        found = gradients(net)

    assert ebb.stats()["total"]["entered"] >= 2
    assert all(map(same_bits, found, expected))


@pytest.mark.parametrize("stack", [(), ("ddp",), ("fsdp",), ("dp",), ("megatron", "ddp")])
@pytest.mark.parametrize("way", ["apply", "root"])
def test_rules_match_plain_names(stack, way):
    net, _ = wrapped(stack)
    policy = ebb.Policy([ebb.Rule("aten::addmm", ebb.SAVE, module="layers.1.up")])

    if way == "apply":
        with ebb.apply(net, policy, "layers.*"):
            gradients(net)
    else:
        with ebb.region(policy, root=net):
            net(torch.ones(2, 4)).sum()

    assert ebb.stats()["total"]["bytes_saved"] == 32


@pytest.mark.parametrize("stack", [("ddp",), ("fsdp",), ("compile",), ("dp", "checkpoint")])
def test_names_in_variables_match(stack, monkeypatch):
    lines = []
    monkeypatch.setattr(models, "print_first", lines.append)
    net, _ = wrapped(stack)
    takeover.install(ebb.policies.recompute_all, "1", ("layers.?",))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a compiler decides by itself
            net(torch.ones(2, 4))
        line = lines[-1]
        assert line.startswith("ebb: 2 modules are regions: ")
        assert "layers.0" in line
    finally:
        takeover.remove()


def test_averaged_model_is_a_wrapper():
    net = AveragedModel(Net())
    with ebb.apply(net, modules="layers.*") as handle:
        assert handle.names == ("module.layers.0", "module.layers.1")


def test_module_named_module_keeps_its_name():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = Block()

    net = nn.Sequential(Residual())
    assert "0.module.up" in [named.plain for named in modules_of(net)]
    with pytest.raises(ValueError, match=r"no module matches '0\.up'"):
        ebb.apply(net, modules="0.up")


def test_messages_name_modules_without_their_wrappers():
    net, _ = wrapped(("ddp",))
    with pytest.raises(ValueError, match=r"Module names: layers, layers\.0, layers\.0\.up"):
        ebb.apply(net, modules="blocks.*")
