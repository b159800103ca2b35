"""`ebb.metrics()`: numbers of one step, for a logger."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import ebb
from ebb import _C
from ebb._report.metrics import Metrics
from ebb_tests.one_step_report import blocks
from ebb_tests.other_threads import run_in_threads

LARGE = 8 << 20  # bytes


@pytest.fixture
def measured():
    return Metrics()


def step(model, batches=1):
    """One step, and the sum of what `ebb.stats()` says after each backward."""
    total = {}
    for _ in range(batches):
        model(torch.randn(8, 16)).square().mean().backward()
        for name, count in ebb.stats()["total"].items():
            total[name] = total.get(name, 0) + count
    return {f"ebb/{name}": count for name, count in total.items()}


def counts_of(metrics, expected):
    return {name: metrics[name] for name in expected}


def test_counts_of_a_step_with_accumulated_gradients(measured):
    with ebb.apply(model := blocks(), ebb.policies.save_matmuls, modules="?"):
        step(model)
        measured.read()
        expected = step(model, batches=3)
        found = measured.read()

    assert counts_of(found, expected) == expected
    assert found["ebb/passes"] == 3
    assert found["ebb/ops_replayed"] > 0 < found["ebb/bytes_dropped"]
    assert found["ebb/replay_ms"] > 0 == found["ebb/replay_ahead_ms"]
    assert all(name.startswith("ebb/") for name in found)
    assert {type(value) for value in found.values()} == {int, float}
    assert json.loads(json.dumps(found)) == found


def test_counts_are_zero_if_nothing_ran(measured):
    with ebb.apply(model := blocks(), modules="?"):
        step(model)
    measured.read()
    found = measured.read()
    assert found.pop("ebb/peak_bytes") >= 0
    assert set(found.values()) == {0}


def test_reset_of_statistics_loses_no_counts(measured):
    with ebb.apply(model := blocks(), modules="?"):
        step(model)
        measured.read()
        first = step(model)
        ebb.reset_stats()
        with ebb.region():
            torch.ones(3) * 2
        ebb.reset_stats()
        second = step(model)
    found = measured.read()
    assert found["ebb/ops_replayed"] == first["ebb/ops_replayed"] + second["ebb/ops_replayed"]
    assert found["ebb/entered"] == first["ebb/entered"] + second["ebb/entered"] + 1
    assert found["ebb/passes"] == 2


def test_counts_of_several_models_and_threads(measured):
    with ebb.apply(one := blocks(), modules="?"), ebb.apply(other := blocks(), modules="?"):
        expected = step(one)
        measured.read()
        run_in_threads(lambda: one(torch.randn(8, 16)).square().mean().backward())
        run_in_threads(lambda: other(torch.randn(8, 16)).square().mean().backward())
    found = measured.read()
    assert found["ebb/ops_replayed"] == 2 * expected["ebb/ops_replayed"]
    assert found["ebb/bytes_dropped"] == 2 * expected["ebb/bytes_dropped"]


def test_failed_step_does_not_count_in_the_next(measured):
    class Fails(nn.Module):
        def forward(self, x):
            raise ArithmeticError

    model, broken = blocks(), nn.Sequential(nn.Linear(16, 16), Fails())
    with ebb.apply(model, modules="?"), ebb.apply(broken, modules=""):
        expected = step(model)
        with pytest.raises(ArithmeticError):
            broken(torch.randn(8, 16))
        measured.read()
        step(model)
        found = measured.read()
    assert counts_of(found, expected) == expected
    assert found["ebb/passes"] == 1


def test_evaluation_counts_until_the_next_call(measured):
    with ebb.apply(model := blocks(), modules="?"):
        expected = step(model)
        measured.read()
        with torch.no_grad():
            model(torch.randn(8, 16))
        evaluation = measured.read()
        step(model)
        found = measured.read()
    assert evaluation["ebb/passes"] == evaluation["ebb/bytes_dropped"] == 0
    assert counts_of(found, expected) == expected


# Peaks


def peak(measured):
    return measured.read()["ebb/peak_bytes"]


def test_peak_is_that_since_the_last_call(measured):
    peak(measured)
    first = peak(measured)
    torch.empty(LARGE, dtype=torch.uint8)
    second = peak(measured)
    third = peak(measured)

    assert second - first == LARGE
    assert third == first


def test_readers_of_peaks_and_budgets_are_independent(measured):
    other = Metrics()
    _C.reset_most_tensor_bytes()
    now, _, _ = _C.tensor_bytes()

    torch.empty(LARGE, dtype=torch.uint8)
    found = peak(other)
    other.begin()
    torch.empty(2 * LARGE, dtype=torch.uint8)
    _, budget, _ = _C.tensor_bytes()
    _C.reset_most_tensor_bytes()

    assert found - now == LARGE
    assert peak(other) - now == peak(measured) - now == budget - now == 2 * LARGE
    assert _C.tensor_bytes()[1] == now


def test_freed_readers_are_forgotten(measured):
    for _ in range(100):
        Metrics()
    base = peak(measured)
    torch.empty(LARGE, dtype=torch.uint8)
    assert peak(measured) - base == LARGE


# Times


@torch.library.custom_op("ebb_metrics::slow", mutates_args=())
def slow(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.02)
    return x.sin()


slow.register_autograd(
    lambda context, gradient: gradient * context.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def test_time_of_replays_excludes_forward_and_backward_kernels(measured):
    policy = ebb.Policy({"ebb_metrics::slow": ebb.RECOMPUTE}, default=ebb.RECOMPUTE)
    x = torch.randn(8, requires_grad=True)

    def run():
        with ebb.region(policy):
            return slow(slow(x)).exp().sum()

    run().backward()
    measured.read()
    loss = run()
    forward = measured.read()
    loss.backward()
    backward = measured.read()

    assert forward["ebb/replay_ms"] == 0
    assert backward["ebb/ops_replayed"] >= 2
    assert 40 <= backward["ebb/replay_ms"] < 400


def test_replays_ahead_have_their_own_time(measured):
    ebb.config.ahead.regions = 1
    with ebb.apply(model := blocks(6), modules="?"):
        for _ in range(20):
            measured.begin()
            model(torch.randn(512, 16)).square().mean().backward()
            found = measured.read()
            if found["ebb/ops_replayed_ahead"]:
                break
    assert found["ebb/replay_ahead_ms"] > 0


# Calls in a program


PROGRAM = """
import json, torch, ebb
from ebb import _C
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
def step():
    for _ in range(2):
        net(torch.randn(512, 64)).square().mean().backward()
def nanoseconds():
    return _C.totals()["replay_nanoseconds"]
applied = ebb.apply(net, ebb.policies.recompute_all, "") if APPLY else None
step()
print(json.dumps(nanoseconds()))
for _ in range(3):
    print(json.dumps(ebb.metrics()))
    step()
print(json.dumps(nanoseconds()))
"""


def run(program):
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_first_call_has_counts_only_and_nothing_is_timed_before_it():
    before, first, *others, after = run(PROGRAM.replace("APPLY", "True"))

    assert before == 0 < after
    assert first["ebb/passes"] == 2
    assert not {"ebb/peak_bytes", "ebb/replay_ms"} & first.keys()
    for found in others:
        assert found["ebb/ops_replayed"] == first["ebb/ops_replayed"]
        assert found["ebb/replay_ms"] > 0
        assert found["ebb/peak_bytes"] >= 512 * 64 * 4


def test_program_without_regions_has_only_the_peak():
    _, first, *others, _ = run(PROGRAM.replace("APPLY", "False"))

    assert first == {}
    assert [list(found) for found in others] == [["ebb/peak_bytes"]] * 2


# Plans


def test_metrics_of_an_applied_plan(measured):
    class Net(nn.Sequential):
        def forward(self, x):
            return super().forward(x).square().mean()

    model = Net(*(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(4)))
    other = copy.deepcopy(model)
    x = torch.randn(8, 16, 32)

    def run():
        model(x).backward()
        model.zero_grad()

    plan = ebb.plan(model, run, budget="60%")
    others, _, _ = measured._peak.read()  # bytes of tensors that earlier tests have left
    with plan.apply(model):
        run()
        measured.begin()
        ages = []
        for _ in range(3):
            run()
            found = measured.read()
            ages.append(found["ebb/plan_age"])
        with plan.apply(other):
            assert "ebb/plan_age" not in measured.read(), "of which of the two plans?"
    run()
    eager = measured.read()
    assert ages == [2, 3, 4]
    assert abs(found["ebb/eager_peak_bytes"] / eager["ebb/peak_bytes"] - 1) < 0.02
    assert found["ebb/peak_bytes"] - others < 0.9 * (eager["ebb/peak_bytes"] - others)
    assert not {"ebb/eager_peak_bytes", "ebb/plan_age"} & eager.keys()
