"""Calls of torch.utils.checkpoint, and modules by name, as regions in programs without ebb."""

from __future__ import annotations

import copy
import functools
import inspect
import re

import pytest
import torch
import transformers
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils.checkpoint import (
    CheckpointFunction,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import ebb
from ebb._launch import takeover
from ebb._support.job import _TOLD
from ebb_tests.exactness import same_bits

mm = torch.ops.aten.mm.default


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return ((x @ self.w).sin() @ self.w).sin()


def net(length=2):
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(length)])


class Checkpointed(nn.Module):
    """Hugging Face's way: the layer's own forward, in a partial function."""

    def __init__(self, inner, **options):
        super().__init__()
        self.inner = inner
        self.options = options

    def forward(self, x):
        for block in self.inner:
            x = checkpoint(functools.partial(block.forward), x, **self.options)
        return x


def list_form():
    return create_selective_checkpoint_contexts([mm])


def function_form():
    return create_selective_checkpoint_contexts(lambda context, op, *args, **kwargs: op is mm)


def wrapped():
    model = net()
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    return model


def composed():
    model = net()
    for block in model:
        composable_checkpoint(block)
    return model


def sequential(model):
    return lambda x: checkpoint_sequential(model, 2, x, use_reentrant=False)


WAYS = {
    "reentrant": lambda: Checkpointed(net(), use_reentrant=True),
    "not reentrant": lambda: Checkpointed(net(), use_reentrant=False),
    "no word": lambda: Checkpointed(net()),
    "rng": lambda: Checkpointed(net(), use_reentrant=True, preserve_rng_state=False),
    "options": lambda: Checkpointed(net(), use_reentrant=False, early_stop=False, debug=True),
    "list": lambda: Checkpointed(net(), use_reentrant=False, context_fn=list_form),
    "function": lambda: Checkpointed(net(), use_reentrant=False, context_fn=function_form),
    "wrapper": wrapped,
    "composable": composed,
    "sequential": lambda: sequential(net()),
}


def gradients(model, x):
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    return torch.autograd.grad(model(x).sum(), [x, *[b.w for b in blocks]]), blocks


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant:UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_checkpoint_is_exact_and_recomputed(taken, way):
    x = torch.randn(3, 4, requires_grad=True)
    expected, _ = gradients(net(), x)
    model = WAYS[way]()
    for _ in range(3):
        ebb.reset_stats()
        if way == "sequential":
            found = torch.autograd.grad(model(x).sum(), x)
        else:
            found, blocks = gradients(model, x)
        assert all(map(same_bits, found, expected))
        # torch runs the last segment of a sequence as it is
        assert ebb.stats()["total"]["entered"] == (1 if way == "sequential" else 2)
        assert ebb.stats()["total"]["ops_replayed"] > 0
    if way != "sequential":
        assert [block.calls for block in blocks] == [3, 3]
        assert set(ebb.stats()["regions"]) <= {"Block", "CheckpointWrapper"}


def test_exception_inside_leaves_the_region(taken):
    def fails(x):
        raise ZeroDivisionError

    model = net()
    composable_checkpoint(model[1])
    model[1].forward = fails
    x = torch.randn(4, 4, requires_grad=True)
    for reentrant in (True, False):
        with pytest.raises(ZeroDivisionError):
            checkpoint(fails, x, use_reentrant=reentrant)
        assert not ebb._C.in_region()
    with pytest.raises(ZeroDivisionError):
        model(x)
    assert not ebb._C.in_region()


def test_torchs_functions_look_and_work_as_before():
    def look():
        source = inspect.getsource(inspect.unwrap(checkpoint))[:20]
        return inspect.signature(checkpoint), source, CheckpointFunction.apply

    before = look()
    takeover.install(ebb.policies.recompute_all, "1", ())
    during = look()
    takeover.remove()

    assert during[0] == before[0]
    assert during[2] != before[2]
    assert look() == before
    x = torch.randn(4, 4, requires_grad=True)
    block = net(1)[0]
    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert block.calls == 2


# Modules


def step(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("is_file", [False, True])
def test_modules_that_may_not_exist_are_not_called_regions(take_over, capsys, is_file):
    take_over("*blokcs.*")
    if is_file:
        policies = ebb.ModulePolicies({"blokcs.0": ebb.policies.recompute_all})
        takeover.install_modules(policies, "plan.toml")
    modules = "the modules that the file lists" if is_file else "modules that match *blokcs.*"
    text = "EBB=plan.toml" if is_file else "EBB=1"

    Checkpointed(net(), use_reentrant=False)(torch.ones(4, 4)).sum().backward()

    assert capsys.readouterr().err == (
        f"ebb: calls of torch.utils.checkpoint are regions, and so will be {modules} ({text}); "
        "EBB_DISABLE=1 turns ebb off\n"
    )


def test_modules_become_regions_at_the_first_forward(take_over, capsys):
    take_over("*0", "other.*")
    model = nn.Sequential(net(), net())
    x = torch.randn(4, 4, requires_grad=True)
    expected = torch.autograd.grad(net()(net()(x)).sum(), x)[0]
    ebb.reset_stats()
    found = torch.autograd.grad(model(x).sum(), x)[0]
    assert same_bits(found, expected)
    assert set(ebb.stats()["regions"]) == {"0", "1.0"}
    assert "and so will be modules that match *0,other.*" in capsys.readouterr().err


@pytest.mark.parametrize("strict", [False, True])
def test_name_that_matches_nothing_is_told_of_or_ends_a_strict_job(
    take_over, strict, monkeypatch, capsys
):
    monkeypatch.delenv(_TOLD, raising=False)
    take_over("*.layres.*")
    model = net()
    step(model, torch.randn(4, 4))
    expected = r"no module matches .*\*\.layres\.\*, .* module names of Sequential: 0-1"
    if strict:
        monkeypatch.setenv("EBB_STRICT", "1")
        with pytest.raises(ValueError, match=expected):
            step(model, torch.randn(4, 4))
    else:
        step(model, torch.randn(4, 4))
        assert re.search(expected, capsys.readouterr().err)


def test_rules_for_modules(take_over):
    x = torch.randn(4, 4, requires_grad=True)
    for pattern, nbytes in [("1", 0), ("inner.1", 128), ("inner", 0), ("*", 256)]:
        take_over(policy=ebb.Policy([ebb.Rule("aten::mm", ebb.SAVE, module=pattern)]))
        gradients(Checkpointed(net(), use_reentrant=False), x)
        assert ebb.stats()["total"]["bytes_saved"] == nbytes


def tiny_llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).train()


def train(model, steps=3):
    torch.manual_seed(1)
    ids = torch.randint(0, 61, (2, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers(taken, reentrant):
    expected = train(tiny_llama())
    model = tiny_llama()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert train(model) == expected
    assert ebb.stats()["regions"]["LlamaDecoderLayer"]["entered"] == 3
    assert ebb.stats()["total"]["ops_replayed"] > 0
    assert ebb.stats()["total"]["bytes_saved"] == 0


def test_layers_of_transformers_by_name(take_over):
    expected = train(tiny_llama())
    take_over("*.layers.?")
    assert train(tiny_llama()) == expected
    regions = ebb.stats()["regions"]
    assert set(regions) == {f"model.layers.{i}" for i in range(3)}
    assert all(region["ops_replayed"] > 0 for region in regions.values())


def lazy(x):
    model = nn.Sequential(nn.Sequential(nn.LazyLinear(4)))
    model(x)
    model(x)


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: (m[0](x), m(x)),
        lambda m, x: (m(x), nn.Sequential(m)(x)),
        lambda m, x: (m(x), copy.deepcopy(m)(x)),
        lambda m, x: (ebb.apply(m, modules="0.0"), m(x)),
        lambda m, x: (ebb.apply(m, modules=""), m(x)),
        lambda m, x: lazy(x),
    ],
)
def test_model_runs_whose_parts_are_regions_already_or_are_made_later(take_over, use):
    take_over("*0")
    use(nn.Sequential(net(), net()), torch.randn(4, 4))
