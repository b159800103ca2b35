"""ebb.disable: code in which regions have no effect."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch

import ebb


@pytest.fixture
def x():
    return torch.randn(8, requires_grad=True)


def recomputes(function):
    """True if regions in `function` recompute something in backward."""
    ebb.reset_stats()
    function().sum().backward()
    return ebb.stats()["total"].get("ops_replayed", 0) > 0


def in_a_region(x):
    with ebb.region() as region:
        y = x.sin().cos().exp()
        region.returns(y)
    return y


def test_regions_have_no_effect(x):
    assert recomputes(lambda: in_a_region(x))
    with ebb.disable():
        assert not recomputes(lambda: in_a_region(x))
        assert ebb.stats()["regions"] == {}
    assert recomputes(lambda: in_a_region(x))


def test_modules_and_checkpoint_calls_have_no_effect():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    x = torch.randn(2, 4)
    with ebb.apply(model, modules=""), ebb.disable():
        assert not recomputes(lambda: model(x))
        assert not recomputes(lambda: ebb.checkpoint(model, x))


def test_a_decorator_may_recurse(x):
    @ebb.disable()
    def function(depth):
        return function(depth - 1) if depth else in_a_region(x)

    assert not recomputes(lambda: function(3))
    assert recomputes(lambda: in_a_region(x))


def test_it_ends_with_an_exception(x):
    with pytest.raises(KeyError), ebb.disable():
        raise KeyError
    assert recomputes(lambda: in_a_region(x))


def test_backward_of_an_earlier_region_recomputes(x):
    y = in_a_region(x)
    y.sum().backward()
    expected, x.grad = x.grad, None
    y = in_a_region(x)
    with ebb.disable():
        assert recomputes(lambda: y)
    assert torch.equal(x.grad, expected)


def test_other_threads_have_their_regions(x):
    found = []
    with ebb.disable():
        thread = threading.Thread(target=lambda: found.append(recomputes(lambda: in_a_region(x))))
        thread.start()
        thread.join()
    assert found == [True]


def test_a_region_object_made_outside_counts_where_it_is_entered(x):
    region = ebb.region()
    with ebb.disable(), region:
        y = x.sin().cos()
    assert not recomputes(lambda: y)
    with region:
        y = x.sin().cos()
    assert recomputes(lambda: y)


def test_results_of_a_region_without_effect_are_forgotten(x):
    region = ebb.region(escapes="placeholder")
    with ebb.disable(), region:
        y = x.sin().cos()
        region.returns(y)
    gone = weakref.ref(y)
    del y
    assert gone() is None


def test_inside_of_a_region_it_is_refused(x):
    with ebb.region(), pytest.raises(RuntimeError, match="was entered inside a region"):
        ebb.disable().__enter__()
    assert recomputes(lambda: in_a_region(x))


def test_an_object_is_entered_once_at_a_time():
    disabled = ebb.disable()
    with disabled, pytest.raises(RuntimeError, match="already entered"):
        disabled.__enter__()
    with disabled:
        pass


def test_the_thread_that_has_entered_it_leaves_it(x):
    disabled, errors = ebb.disable(), []

    def leave():
        try:
            disabled.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(str(error))

    disabled.__enter__()
    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert "was left in another thread" in errors[0]
    disabled.__exit__(None, None, None)
    assert recomputes(lambda: in_a_region(x))


@pytest.mark.parametrize("outside", [False, True])
def test_compiled_code_keeps_its_regions(x, outside, fresh_dynamo):
    def program(x):
        with ebb.disable():
            return in_a_region(x)

    compiled = torch.compile(in_a_region if outside else program, backend="aot_eager")
    in_a_region(x).sum().backward()
    expected, x.grad = x.grad, None
    with ebb.disable():
        compiled(x).sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_calls_that_ebb_takes_over_checkpoint_as_torch_does(reentrant):
    program = f"""
import torch, ebb
from torch.utils.checkpoint import checkpoint
calls = []
def block(x):
    calls.append(1)
    return x.sin().cos()
x = torch.ones(4, requires_grad=True)
def step():
    calls.clear()
    checkpoint(block, x, use_reentrant={reentrant}).sum().backward()
    return len(calls)
with ebb.disable():
    inside = step()
print(inside, step())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"EBB": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "2 1\n"  # torch calls the block again, and ebb does not


def test_what_discard_gets_from_a_disabled_region_stays(x):
    with ebb.disable():
        with ebb.region():
            y = ebb.experimental.discardable(x.sin())
        of_call = ebb.checkpoint(torch.cos, x, discard_output=True)
    z = y * of_call
    ebb.experimental.discard(y, restore_at=z)
    ebb.experimental.discard(of_call, restore_at=z)
    assert torch.equal(y, x.sin())
    assert torch.equal(of_call, x.cos())
    z.sum().backward()


def test_a_plan_has_no_regions(tmp_path, capfd):
    blocks = (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(3))
    model, file = torch.nn.Sequential(*blocks), tmp_path / "plan.toml"
    file.write_text("earlier")

    def step():
        model(torch.ones(64, 4)).sum().backward()

    with ebb.disable():
        plans = [ebb.plan(model, step, 0.5), ebb.plan(model, step, 0.5, modules="[01]")]
        for plan in plans:
            with plan.apply(model):
                measured = plan.measure(step).peak
            assert plan.policies == {}
            assert plan.peak == plan.plain_peak == measured
            assert "regions are disabled" in plan.summary()
            assert "fits" not in plan.explain()
            assert len(plan.pareto()) == 1
            plan.save(file)
    assert file.read_text() == "earlier"
    assert "plan.toml' is not written: regions are disabled" in capfd.readouterr().err
    assert ebb.plan(model, step, 0.9).policies


PROGRAM = """
import sys, threading
import torch, ebb

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
x = torch.randn(4, 8, requires_grad=True)
ebb.apply(model, modules="[01]")

@ebb.region(escapes="placeholder")
def own(x):
    return x.sin().cos().exp()

def step(own=own):
    ebb.checkpoint(torch.tanh, own(model(x))).sum().backward()

step()
thread = threading.Thread(target=step)
thread.start()
thread.join()
torch.compile(own, backend="aot_eager")(x).sum().backward()
print(x.grad.tolist(), [p.grad.tolist() for p in model.parameters()])
plan = ebb.plan(model, step, 0.5) if "plan" in sys.argv else None
ebb.metrics()
with ebb.record_reports():
    step()
assert ebb.metrics()["ebb/replay_ms"] >= 0
assert (ebb.report().held == 0) == ("plan" in sys.argv)
ebb.reset_stats()
step()
is_watched = hasattr(torch.UntypedStorage.__getitem__, "_ebb_sees")
print(sorted(ebb.stats()["regions"]), is_watched, plan, file=sys.stderr)
"""


def run_program(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )


def test_the_variable_disables_regions_of_the_program():
    usual, disabled = run_program(), run_program("plan", EBB_DISABLE="1")
    assert usual.stdout == disabled.stdout  # gradients
    assert "'own'] True None" in usual.stderr
    line, found = disabled.stderr.splitlines()
    assert line == "ebb: EBB_DISABLE=1: regions of the program have no effect"
    assert found.startswith("[] False <ebb.Plan: regions are disabled")


def test_the_variable_disables_regions_of_compiled_functions(monkeypatch, x, fresh_dynamo):
    from ebb._region import in_graph

    monkeypatch.setattr(in_graph, "is_switched_off", lambda: True)
    compiled = torch.compile(in_a_region, backend="aot_eager")
    number = in_graph.new_number()
    compiled(x).sum().backward()
    assert in_graph.names_entered(number) == set()
    monkeypatch.undo()
    torch._dynamo.reset()
    compiled(x).sum().backward()
    assert in_graph.names_entered(number) == {"region"}
