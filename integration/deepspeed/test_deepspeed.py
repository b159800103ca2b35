"""DeepSpeed's checkpointing with regions. Offloading by both raises an error."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb._launch import frameworks, takeover

checkpointing = pytest.importorskip(
    "deepspeed.runtime.activation_checkpointing.checkpointing", reason="needs DeepSpeed"
)


def test_offloading_twice_is_refused(monkeypatch):
    monkeypatch.setattr(checkpointing, "CPU_CHECKPOINT", True)
    with (
        pytest.raises(RuntimeError, match=r"DeepSpeed.*cpu_checkpointing to false"),
        ebb.region(ebb.policies.offload_inputs),
    ):
        pass
    with ebb.region(ebb.policies.recompute_all):
        pass


@pytest.mark.parametrize("where", ["inside", "around"])
def test_a_region_and_deepspeeds_function(where):
    w = torch.randn(16, 16, requires_grad=True)
    x = torch.randn(4, 16, requires_grad=True)

    def block(x):
        return (x @ w).sin().exp()

    @ebb.region(ebb.policies.recompute_all)
    def block_in_region(x):
        return block(x)

    def program():
        if where == "inside":
            return checkpointing.checkpoint(block_in_region, x).sum()
        with ebb.region(ebb.policies.recompute_all):
            return checkpointing.checkpoint(block, x).sum()

    program().backward()
    found = w.grad.clone(), x.grad.clone()
    w.grad = x.grad = None
    block(x).sum().backward()
    assert torch.equal(found[0], w.grad)
    assert torch.equal(found[1], x.grad)


@pytest.fixture
def taken_over():
    takeover.install(ebb.policies.recompute_all, "1", ())
    yield
    takeover.remove()


def gradients(call):
    """Results of two blocks under `call`: loss, gradients, and a random number drawn after."""
    torch.manual_seed(2)
    w = torch.randn(16, 16, requires_grad=True)
    x = torch.randn(4, 16, requires_grad=True)

    def first(x):
        y = torch.nn.functional.dropout((x @ w).sin(), 0.5)
        return y, y.exp()

    def second(y, z):
        return (y @ w).tanh() * z

    loss = call(second, *call(first, x)).sum()
    loss.backward()
    return [loss.detach(), w.grad, x.grad, torch.rand(1)]


@pytest.mark.usefixtures("taken_over")
@pytest.mark.parametrize("name", ["checkpoint", "non_reentrant_checkpoint"])
def test_its_calls_are_regions(name, capfd):
    expected = gradients(lambda function, *args: function(*args))
    ebb.reset_stats()

    found = gradients(getattr(checkpointing, name))

    assert all(map(torch.equal, found, expected))
    assert ebb.stats()["total"]["entered"] == 2
    assert ebb.stats()["total"]["ops_replayed"] > 0
    assert "ebb: calls of checkpoint of DeepSpeed " in capfd.readouterr().err


@pytest.mark.usefixtures("taken_over")
def test_a_keyword_is_passed_on():
    x = torch.randn(4, requires_grad=True)

    y = checkpointing.checkpoint(lambda x, *, scale: x.sin() * scale, x, scale=3.0)

    assert torch.equal(y, x.sin() * 3.0)


@pytest.mark.parametrize(
    ("flag", "key"),
    [("CPU_CHECKPOINT", "cpu_checkpointing"), ("PARTITION_ACTIVATIONS", "partition_activations")],
)
def test_settings_of_its_own_are_left_to_it(flag, key, capfd, monkeypatch, request):
    monkeypatch.setattr(checkpointing, flag, True)
    monkeypatch.setattr(
        frameworks.takeover, "copy_of", lambda copied: lambda *args: copied.__name__
    )
    request.getfixturevalue("taken_over")

    assert checkpointing.checkpoint(torch.sin, torch.randn(4)) == "checkpoint"
    assert f"{key} is on" in capfd.readouterr().err
