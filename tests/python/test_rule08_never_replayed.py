"""Rule 8: collectives run once, whatever the policy says, unless a rule forces them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ebb

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"
)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loss_of(x, policy):
    functional = torch.ops._c10d_functional
    with ebb.region(policy):
        h = x * 2
        reduced = functional.wait_tensor(functional.all_reduce(h.detach(), "sum", "0"))
        return ((reduced + x).exp() * reduced).sum()


@pytest.mark.usefixtures("group")
def test_functional_collective_is_not_run_again():
    x = torch.randn(4, requires_grad=True)
    expected = torch.autograd.grad(loss_of(x, ebb.policies.save_all), x)[0]
    ebb.reset_stats()

    actual = torch.autograd.grad(loss_of(x, ebb.policies.recompute_all), x)[0]

    assert torch.equal(actual, expected)
    assert ebb.stats()["total"]["ops_replayed"] <= 2  # add, exp


@pytest.mark.usefixtures("group")
def test_inplace_collective_makes_a_leaf():
    x = torch.randn(4, requires_grad=True)

    def program(region):
        with region:
            h = (x * 2).detach()
            dist.all_reduce(h)
            h2 = (x * h).exp()
        return torch.autograd.grad(h2.sum(), x)[0]

    assert torch.equal(program(ebb.region()), program(ebb.region(ebb.policies.save_all)))


@pytest.mark.usefixtures("group")
def test_force_replays_an_operator_named_exactly():
    policy = ebb.Policy(
        [
            ebb.Rule(f"_c10d_functional::{op}", ebb.RECOMPUTE, force=True)
            for op in ("all_reduce", "wait_tensor")
        ]
    )
    x = torch.randn(4, requires_grad=True)
    expected = torch.autograd.grad(loss_of(x, ebb.policies.save_all), x)[0]

    assert torch.equal(torch.autograd.grad(loss_of(x, policy), x)[0], expected)


def test_force_needs_an_exact_name():
    with pytest.raises(ValueError, match="glob with force"):
        ebb.Policy([ebb.Rule("_c10d_functional::*", ebb.RECOMPUTE, force=True)])
