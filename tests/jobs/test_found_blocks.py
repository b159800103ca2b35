"""EBB without module names: blocks become regions, unless the job calls torch.utils.checkpoint."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ebb
from ebb._launch import takeover
from ebb._launch.assignment import Assignment
from ebb._launch.budgeted import Blocks
from ebb._launch.models import FoundBlocks
from ebb_tests.budget_jobs import Job, Net, assert_same, peak_of, regions

LAYERS = {f"layers.{i}" for i in range(4)}


@pytest.fixture
def install(take_over):
    return functools.partial(take_over, finds_blocks=True)


def lines(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("ebb:")]


class Inside(Net):
    """Its blocks checkpoint a part of themselves."""

    def forward(self, x):
        for layer in self.layers:
            layer.down.forward = lambda y, down=layer.down: checkpoint(
                type(down).forward, down, y, use_reentrant=False
            )
        return super().forward(x)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 1)

    def forward(self, x):
        return self.down(self.up(x).relu())


def evaluated_first():
    job = Job()
    with torch.no_grad():
        job.model(torch.ones(2, 16))
    return job


FOUND = (
    "ebb: 4 modules are regions: layers.0-3 (EBB=1, since the job does not call "
    "torch.utils.checkpoint); EBB_MODULES=none turns this off"
)
CALLS = "calls of torch.utils.checkpoint are regions"


@pytest.mark.parametrize(
    ("make", "settings", "names", "told"),
    [
        (Job, {}, LAYERS, [FOUND]),
        (evaluated_first, {}, LAYERS, [FOUND]),
        (lambda: Job(checkpoints=True), {}, set(), [CALLS]),
        (lambda: Job(Inside), {}, set(), [CALLS]),
        (
            lambda: Job(checkpoints=True),
            {"stay": True},
            LAYERS,
            [CALLS, "4 modules are regions: layers.0-3 (EBB=1)"],
        ),
    ],
    ids=["blocks", "evaluated first", "calls around blocks", "calls in blocks", "blocks and calls"],
)
def test_blocks_are_regions_unless_the_job_calls_checkpoint(
    install, capsys, make, settings, names, told
):
    expected = make().train(4)
    install(**settings)

    found = make().train(1)
    assert not names or set(regions(found.model)) == names  # from the first step on
    found.train(3)

    assert_same(found, expected)
    assert set(regions(found.model)) == names
    found = lines(capsys)
    assert len(found) == len(told)
    assert all(part in line for part, line in zip(told, found, strict=True))


@pytest.mark.not_sanitized
def test_blocks_take_less_memory(install):
    eager = Job(depth=12).train(2)
    peak, _ = peak_of(eager)
    install()

    job = Job(depth=12).train(2)
    found, _ = peak_of(job)

    assert found < 0.4 * peak


def test_model_without_blocks_is_told_of_or_ends_a_strict_job(install, capsys, monkeypatch):
    install()

    job = Job(Small).train(4)

    assert regions(job.model) == {}
    (line,) = lines(capsys)
    assert "EBB=1 has no effect so far: the job does not call torch.utils.checkpoint" in line
    assert "Small" in line
    assert "EBB_MODULES" in line
    takeover.remove()
    monkeypatch.setenv("EBB_STRICT", "1")
    install()
    with pytest.raises(ValueError, match="EBB=1 has no effect so far"):
        Job(Small).train(4)


def test_job_that_does_not_train_is_told_nothing(install, capsys):
    install()
    with torch.no_grad():
        Net()(torch.ones(2, 16))
    takeover.remove()
    assert lines(capsys) == []


def test_calls_without_gradients_are_no_regions(install):
    install()
    job = Job().train(1)
    ebb.reset_stats()

    with torch.no_grad():
        job.model(torch.ones(2, 16))

    assert ebb.stats()["regions"] == {}


def test_strict_job_that_has_ended_is_not_said_to_end(monkeypatch, capsys):
    monkeypatch.setenv("EBB_STRICT", "1")
    monkeypatch.setenv("_EBB_TOLD", "")  # lines that were printed once
    taken = Assignment(ebb.policies.recompute_all, "EBB=1", ())
    blocks = FoundBlocks(taken, stay=False)
    blocks.on_new_model(Small())

    blocks.print_found(is_late=True)

    line = lines(capsys)[0]
    assert "EBB=1 has no effect so far" in line
    assert "the job ends" not in line


def whole(model):
    return torch.compile(model, backend="aot_eager")


def each(model):
    for n, layer in enumerate(model.layers):
        model.layers[n] = torch.compile(layer, backend="aot_eager")
    return model


def in_place(model):
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


@pytest.mark.sweep
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:Using .torch.compile:UserWarning")
@pytest.mark.parametrize("compiled", [whole, each, in_place])
def test_compiled_blocks_are_regions_in_their_graphs(install, capsys, compiled):
    def steps():
        torch.manual_seed(0)
        model = Net(dropout=0.0)
        call = compiled(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for _ in range(3):
            y = call(torch.randn(64, 16))
            found.append(saved_bytes(y.grad_fn, model))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return found, [p.detach().clone() for p in model.parameters()]

    eager_saved, expected = steps()
    install()
    saved, found = steps()

    assert all(map(torch.equal, found, expected))
    assert max(saved) < 0.4 * min(eager_saved)
    assert "4 modules are regions: layers.0-3 (EBB=1" in lines(capsys)[0]


def saved_bytes(node, model):
    """Bytes that compiled graphs save for backward, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found, nodes, seen = {}, [node], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        for tensor in node.saved_tensors if "CompiledFunction" in node.name() else ():
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(nbytes for at, nbytes in found.items() if at not in own)


@pytest.mark.usefixtures("fresh_dynamo")
def test_checkpoint_in_compiled_code_counts_as_a_call(install, capsys):
    install()
    job = Job(checkpoints=True)
    job.model.compile(backend="aot_eager")
    job.train(3)
    told = lines(capsys)
    assert all("does not call torch.utils.checkpoint" not in line for line in told), told


def test_calls_of_a_block_in_several_threads_are_all_counted():
    """As the threads of nn.DataParallel, whose replicas share a block."""
    model, x = Net(), torch.ones(2, 16)
    blocks = Blocks(("layers.0",))
    blocks.add(model, ebb.policies.recompute_all)
    (block,) = blocks.alive()
    other = threading.Thread(target=block, args=(torch.sin, x))

    class WhileOtherCalls(int):
        def __add__(self, one):
            block.calls = 0
            other.start()
            other.join(0.2)  # it waits for this call, or does not
            return int(self) + one

    block.calls = WhileOtherCalls()
    block(torch.sin, x)
    other.join()

    assert block.calls == 2
