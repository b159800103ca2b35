"""Rule 8: collectives run once, whatever the policy says; no rule can force them to run again.

So do operators that read memory which nothing has written.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ebb
from ebb_tests.exactness import PYTEST, run_process
from ebb_tests.memory_fills import NO_CACHES, fills_all_memory, new_memory_filled_with

pytestmark = [
    pytest.mark.engines("exactness", "device", "checked"),
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(),
        reason="torch was built without gloo",
    ),
]


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


@pytest.mark.on_cpu("gloo has no tensors of the test device")
@pytest.mark.usefixtures("group")
def test_functional_collective_is_not_run_again():
    x = torch.randn(4, requires_grad=True)
    expected = torch.autograd.grad(loss_of(x, ebb.policies.save_all), x)[0]
    ebb.reset_stats()

    actual = torch.autograd.grad(loss_of(x, ebb.policies.recompute_all), x)[0]

    assert torch.equal(actual, expected)
    assert ebb.stats()["total"]["ops_replayed"] <= 2  # add, exp


@pytest.mark.on_cpu("gloo has no tensors of the test device")
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


NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor")
COLLECTIVES = [
    name for name in torch._C._dispatch_get_all_op_names() if name.split("::")[0] in NAMESPACES
]


REPEATABLE = {rule.op.split(".")[0] for rule in ebb.policies.recompute_collectives.rules}


def test_force_is_refused_where_ranks_have_different_parts():
    assert {"c10d::allreduce_", "_c10d_functional::all_reduce"} < REPEATABLE
    for name in COLLECTIVES:
        for spelt in {name, name.split(".")[0], name.replace("::", ".")}:
            rules = [ebb.Rule("aten::mm", ebb.SAVE), ebb.Rule(spelt, ebb.RECOMPUTE, force=True)]
            if name.split(".")[0] in REPEATABLE:
                ebb.Policy(rules)
            else:
                with pytest.raises(ValueError, match=r"replays cannot repeat.*remove force"):
                    ebb.Policy(rules)
        ebb.Policy([ebb.Rule(name, ebb.RECOMPUTE)])  # without force it is no error


def test_force_in_text_is_refused_for_a_collective(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(
        '[[rules]]\nop = "_c10d_functional::isend"\ndecision = "recompute"\nforce = true\n'
    )

    with pytest.raises(ValueError, match="replays cannot repeat"):
        ebb.Policy.load(path)


@pytest.mark.replays
def test_force_replays_an_operator_with_packed_weights():
    weight = torch.randn(3, 4)
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    x = torch.randn(2, 4, requires_grad=True)

    def gradient(policy):
        ebb.reset_stats()
        with ebb.region(policy):
            y = torch.ops.quantized.linear_dynamic_fp16(x.detach() * 2, packed).sin() * x[:, :3]
        gradient = torch.autograd.grad(y.sum(), x)[0]
        return gradient, ebb.stats()["total"]["ops_replayed"]

    expected, kept = gradient(ebb.policies.recompute_all)
    rule = ebb.Rule("quantized::linear_dynamic_fp16", ebb.RECOMPUTE, force=True)
    actual, forced = gradient(ebb.Policy([rule]))

    assert torch.equal(actual, expected)
    assert forced > kept


def test_force_needs_an_exact_name():
    with pytest.raises(ValueError, match="combines force with a glob"):
        ebb.Policy([ebb.Rule("_c10d_functional::*", ebb.RECOMPUTE, force=True)])


@pytest.mark.on_cpu("the driver is LAPACK's", run=False)
@pytest.mark.not_sanitized
def test_least_squares_with_pivots_from_new_memory_are_not_run_again(request):
    if not fills_all_memory():
        run_process([*PYTEST, f"{__file__}::{request.node.name}"], **NO_CACHES)
        return
    torch.manual_seed(3)
    a, b = torch.randn(6, 3), torch.randn(6, 2)

    def gradient(driver, region, in_forward=0x00):
        x = a.clone().requires_grad_()
        with new_memory_filled_with(in_forward), region:
            loss = torch.linalg.lstsq(x * 1.5, b, driver=driver).solution.exp().sum()
        with new_memory_filled_with(0x55):
            return torch.autograd.grad(loss, x)[0]

    for driver in (None, "gelsy"):
        expected = gradient(driver, torch.enable_grad())
        actual = gradient(driver, ebb.region(ebb.policies.recompute_all))

        assert torch.equal(actual, expected)
        assert not torch.equal(gradient(driver, torch.enable_grad(), 0x55), expected)
