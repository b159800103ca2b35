"""Profiles: the operators of a step, what each read and made, and what was allocated when."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity

import ebb
from ebb import _C, _testing
from ebb_tests.exactness import same_bits
from ebb_tests.memory_use import least_growth
from ebb_tests.other_threads import in_thread

WIDTH = 16


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)))


def step_of(net, policy=ebb.policies.save_all, x=None):
    x = torch.randn(8, WIDTH) if x is None else x

    def step():
        h = x
        for i, block in enumerate(net):
            with ebb.region(policy, f"blocks.{i}"):
                h = block(h)
        h.square().sum().backward()

    return step


def names(profile):
    return [operator.func_name for operator in profile.operators]


def test_it_has_the_operators_in_order_and_what_flows_between_them():
    found = ebb.profile(step_of(model()))

    assert names(found) == ["aten::addmm.default", "aten::gelu.default"] * 3
    assert [one.region for one in found.operators] == [f"blocks.{i // 2}" for i in range(6)]
    for product, act in zip(found.operators[::2], found.operators[1::2], strict=True):
        (made,) = product.outputs
        assert act.inputs == (made,)
        value = found.values[made]
        assert (value.memory, value.shape, value.dtype) == (8 * WIDTH * 4, (8, WIDTH), "float32")
        assert value.saved
        assert value.fate == "saved"
        assert product.replayable
        assert not product.random
        assert not product.inplace
        assert 0 < product.start < act.start < found.duration
        assert product.runtime > 0
    of_parameters = found.operators[0].inputs
    assert {found.values[one].shape for one in of_parameters} >= {(WIDTH,), (WIDTH, WIDTH)}


def test_times_of_a_value_are_in_order():
    found = ebb.profile(step_of(model()))

    asked = []
    for operator in found.operators[::2]:
        value = found.values[operator.outputs[0]]
        assert operator.start <= value.made < value.asked <= value.ended <= found.duration
        asked.append(value.asked)
    assert asked == sorted(asked, reverse=True)


def test_of_what_is_recomputed():
    found = ebb.profile(step_of(model(), ebb.policies.recompute_all))

    fates = [found.values[one.outputs[0]].fate for one in found.operators]
    assert fates[0] == "recomputed"
    assert names(found) == ["aten::addmm.default", "aten::gelu.default"] * 3, "replays are no calls"


def test_random_and_written():
    def step():
        x = torch.ones(8, requires_grad=True)
        with ebb.region(ebb.policies.save_all):
            y = F.dropout(x.exp(), 0.5).mul_(2)
        y.sum().backward()

    found = {one.func_name: one for one in ebb.profile(step).operators}

    assert found["aten::bernoulli_.float"].random
    assert not found["aten::exp.default"].random
    write = found["aten::mul_.Tensor"]
    assert write.inplace
    assert write.outputs != write.inputs[:1]


def test_why_a_value_cannot_be_recomputed():
    def step():
        x = torch.ones(8, requires_grad=True)
        with ebb.region(ebb.policies.recompute_all):
            y = x * torch.empty_like(x).fill_(2)
        y.sum().backward()

    found = ebb.profile(step)

    (empty,) = (one for one in found.operators if one.func_name.startswith("aten::empty_like"))
    assert not empty.replayable


def peak_by_torch(step):
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    now = most = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.parametrize("policy", [ebb.policies.save_all, ebb.policies.recompute_all])
def test_allocations_are_those_that_torchs_profiler_sees(policy):
    net = model()
    step = step_of(net, policy)
    step()  # makes the gradients

    found = ebb.profile(step)

    assert found.peak == peak_by_torch(step) > 0
    times = [time for time, _, _ in found.allocations]
    assert times == sorted(times)
    taken = {place for _, place, taken in found.allocations if taken > 0}
    assert {found.values[one.outputs[0]].address for one in found.operators} <= taken


def test_what_is_done_does_not_depend_on_it():
    plain, profiled = model(), model()
    x = torch.randn(8, WIDTH)
    ebb.config.ahead.regions = 1
    did = ebb.stats()["ahead"]["regions_held"]
    ebb.profile(step_of(profiled, ebb.policies.recompute_all, x), steps=1, warmup=0)
    assert ebb.stats()["ahead"]["regions_held"] == did
    ebb.config.ahead.regions = 0
    step_of(plain, ebb.policies.recompute_all, x)()

    for one, other in zip(plain.parameters(), profiled.parameters(), strict=True):
        assert same_bits(one.grad, other.grad)


def test_reports_go_on_without_what_a_profile_saw():
    with ebb.record_reports():
        step_of(model())()
        expected = ebb.report().totals
        ebb.profile(step_of(model()[:1]))
        step_of(model())()
        assert {row.region for row in ebb.report().rows} == {f"blocks.{i}" for i in range(3)}
        assert ebb.report().totals == expected


def test_runtimes_are_medians_and_the_rest_is_of_one_step():
    step = step_of(model())
    found = ebb.profile(step, steps=5)
    once = ebb.profile(step, steps=1)

    assert names(found) == names(once)
    assert len({value.made for value in found.values}) > 1


def test_steps_that_differ():
    nets = iter([model(), model(), model()[:2]])

    with pytest.raises(
        RuntimeError, match="step 2 differs from step 1 at operator 4: no operator instead of"
    ):
        ebb.profile(lambda: step_of(next(nets))(), steps=2)

    sizes = iter([8, 8, 9])
    kinds = {8: F.gelu, 9: F.silu}

    def step():
        size = next(sizes)
        x = torch.randn(size, requires_grad=True)
        with ebb.region():
            y = kinds[size](x.sin())
        y.sum().backward()

    with pytest.raises(RuntimeError, match=r"operator 1: 'aten::silu.default' instead of"):
        ebb.profile(step, steps=2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"steps": 0}, ValueError, "steps must be 1 or more; got 0"),
        ({"warmup": -1}, ValueError, "warmup must be 0 or more; got -1"),
        ({"steps": 1.5}, TypeError, "steps must be an int; got 1.5"),
        ({"warmup": True}, TypeError, "warmup must be an int; got True"),
    ],
)
def test_arguments_that_make_no_sense(arguments, error, message):
    with pytest.raises(error, match=f"ebb: {message}"):
        ebb.profile(lambda: None, **arguments)


@pytest.mark.not_sanitized  # AddressSanitizer keeps what is freed
def test_nothing_is_left_of_profiles_and_plans():
    net = model()
    step = step_of(net, ebb.policies.recompute_all)
    x = torch.randn(8, WIDTH)
    before = _testing.live_traces()

    found = ebb.profile(step)
    grown = least_growth(lambda: [ebb.profile(step, steps=1, warmup=0) for _ in range(100)])
    ebb.plan(net, lambda: net(x).sum().backward(), 1.0)

    assert _testing.live_traces() == before
    assert all(value.ended > 0 for value in found.values)
    assert grown < 256, f"100 profiles leave {grown} KiB"


def test_an_error_of_the_step_ends_the_profile():
    def step():
        step_of(model())()
        raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            ebb.profile(step, warmup=0)
    assert len(ebb.profile(step_of(model())).operators) == 6


def test_one_at_a_time():
    def inner():
        ebb.profile(step_of(model()))

    with pytest.raises(RuntimeError, match="is already recording"):
        ebb.profile(inner, warmup=0)
    with pytest.raises(RuntimeError, match="no profile has begun"):
        _C.end_profile()


def test_it_ends_where_it_began():
    """What hears of allocations would stay on the thread, and torch's profiler could not start."""
    _C.begin_profile()
    step_of(model())()

    def end():
        with pytest.raises(RuntimeError, match="must end on the thread on which it began"):
            _C.end_profile()
        return True

    assert in_thread(end)
    step_of(model())()
    found = _C.end_profile()

    assert len(found["operators"]) == 6, (
        "the second step ran after the failed end, and is not recorded"
    )
    assert peak_by_torch(step_of(model())) > 0


def test_not_within_torchs_profiler_nor_that_within():
    """Its callbacks would take what hears of allocations for their own."""
    step = step_of(model())
    with (
        torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True),
        pytest.raises(RuntimeError, match=r"torch.profiler is active on this thread"),
    ):
        ebb.profile(step)
    with pytest.raises(RuntimeError, match="Profiler is already enabled"):
        ebb.profile(lambda: peak_by_torch(step))

    assert peak_by_torch(step) > 0
    assert ebb.profile(step).peak > 0


@pytest.mark.parametrize("clears", ["first", "after a new batch", "between", "last"])
def test_the_peak_is_that_of_a_plan_wherever_gradients_are_freed(clears):
    """With regions, and without."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    batch = [torch.randn(32, 64)]

    def step():
        if clears == "after a new batch":
            batch.append(torch.randn(32, 64))
            del batch[0]
        if clears in ("first", "after a new batch"):
            net.zero_grad()
        loss = net(batch[0]).square().mean()
        if clears == "between":
            net.zero_grad()
        loss.backward()
        if clears == "last":
            net.zero_grad()

    step()
    plan = ebb.plan(net, step, 0.9)

    assert ebb.profile(step).peak == pytest.approx(plan.plain_peak, rel=0.05)
    with plan.apply(net):
        assert ebb.profile(step).peak == pytest.approx(plan.peak, rel=0.05)
    gradients = sum(one.nbytes for one in net.parameters())
    assert gradients > 0.2 * plan.plain_peak


def test_the_peak_of_a_step_that_allocates_nothing():
    assert ebb.profile(lambda: None).peak == 0
