"""Replays ahead of backward on a device."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

import ebb
from ebb_tests import device as late
from ebb_tests.device_leaves import leaf, needs_captures
from ebb_tests.programs.ahead import (
    Squeeze,
    WaitInBackward,
    X,
    all_same,
    blocks,
    bytes_in_use_between_regions,
    chain,
    counts,
    in_backward,
    parameters,
    region,
)
from ebb_tests.replays import delays, wait_for_replays

RECOMPUTE = ebb.policies.recompute_all
INPUTS_LEAVE = ebb.Policy({"aten::native_layer_norm": ebb.OFFLOAD}, inputs=ebb.OFFLOAD)


def on(device, modules):
    return [module.to(device) for module in modules]


def chain_that_never_waits(modules, x, entered):
    for module in modules:
        with entered():
            x = module(x)
    return x


def backward(loss, modules, *more):
    return [loss.detach(), *torch.autograd.grad(loss, [*parameters(modules), *more])]


def step_of(modules, x, chained=chain):
    """A program for `assert_exact`: a chain of the modules and its backward."""
    return lambda entered: backward(chained(modules, x, entered).sum(), modules, x)


def found(tensors):
    torch.accelerator.synchronize()
    return [t.cpu() for t in tensors]


def assert_exact(program, steps=3):
    torch.manual_seed(3)
    expected = found(program(contextlib.nullcontext))
    for _ in range(steps):
        torch.manual_seed(3)
        assert all_same(found(program(region)), expected)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("chained", [chain, chain_that_never_waits])
def test_gradients_and_masks_are_eagers(chained, dropout, ahead, device):
    modules, x = on(device, blocks(4, dropout=dropout)), leaf(device, *X)

    did = counts(lambda: assert_exact(step_of(modules, x, chained)))
    assert did["failures"] == 0
    assert chained is not chain or dropout > 0 or did["regions_in_time"] == 9


@pytest.mark.parametrize(("compute", "side"), [(0, 0), (300, 0), (0, 300), (200, 200)])
def test_streams_run_late_at_random(ahead, device, compute, side):
    modules, x = on(device, blocks(4)), leaf(device, *X)
    with late.delayed(compute, side):
        assert_exact(step_of(modules, x, chain_that_never_waits))


@pytest.mark.parametrize("at_once", [False, True], ids=["in turn", "all forwards first"])
def test_streams_of_the_programs_own(at_once, ahead, device):
    """If all forwards come first, nothing is recorded between the backwards."""
    modules = on(device, blocks(3))
    streams = [torch.Stream(device=device) for _ in range(2)]
    xs = [leaf(device, *X) for _ in streams]
    torch.accelerator.synchronize()

    def program(entered):
        steps, results = [], []
        for stream, x in zip(streams, xs, strict=True):
            with stream:
                steps.append((stream, chain(modules, x, entered).sum(), x))
            if not at_once:
                results += backward_of(*steps.pop())
        for step in steps:
            results += backward_of(*step)
        return results

    def backward_of(stream, loss, x):
        with stream:
            return backward(loss, modules, x)

    assert_exact(program)


def test_escape_replayed_ahead_waits_for_the_stream_that_asks(ahead, device):
    """The stream asks for an input, which was not replayed."""
    streams = [torch.Stream(device=device) for _ in range(2)]
    x, factor = leaf(device, *X), leaf(device, *X)
    late.synchronize()
    with streams[0]:
        with ebb.region(RECOMPUTE, escapes="placeholder"):
            h = x.sin()
            escaped = h.detach()
            product = factor * h
            y = product * 1
            function = product.grad_fn
            del h, product
        streams[1].wait_stream(streams[0])
        with region():
            loss = WaitInBackward.apply(y).sin().cos().sum()
        torch.autograd.grad(loss, y)
    wait_for_replays()
    with streams[1]:
        _ = function._saved_self
        read = escaped * 1
    late.synchronize()

    assert torch.equal(read.cpu(), x.detach().cpu().sin())


def test_two_devices(ahead, device):
    other = torch.device(device.type, 1)
    near, far = on(device, blocks(2)), on(other, blocks(2))
    x = leaf(device, *X)

    def program(entered):
        h = chain(near, x, entered)
        h = chain(far, h.to(other), entered)
        return backward(h.sum(), [*near, *far], x)

    assert_exact(program)


@pytest.mark.parametrize("prefetch", [0, 1 << 30])
def test_offloaded_inputs_come_back_ahead(prefetch, ahead, device):
    """With `prefetch` 0 too: the worker fetches what its recipes read."""
    ebb.config.update(
        offload_min_bytes=1, offload_in_flight_bytes=0, offload_prefetch_bytes=prefetch
    )
    modules, x = on(device, blocks(4)), leaf(device, *X)

    def program(entered):
        entered = (lambda: ebb.region(INPUTS_LEAVE)) if entered is region else entered
        return backward(chain(modules, x, entered).sum(), modules, x)

    before = ebb.stats()["offload"]
    did = counts(lambda: assert_exact(program))
    after = ebb.stats()["offload"]
    assert did["failures"] == 0
    assert after["bytes_fetched"] > before["bytes_fetched"]
    if prefetch:
        # At most two regions' worth is fetched ahead: the first two of each step, and inputs of a
        # region whose replay ahead begins before that.
        assert after["fetched_late"] - before["fetched_late"] <= 15


def test_offloaded_inputs_come_back_within_the_limit(ahead, device):
    ebb.config.update(offload_min_bytes=1, offload_in_flight_bytes=0, offload_prefetch_bytes=0)
    modules, x = on(device, blocks(2)), leaf(device, *X)
    fetched = []

    def look(gradient):
        wait_for_replays()
        fetched.append(ebb.stats()["offload"]["bytes_fetched"])

    def run(**settings):
        ebb.config.update({f"ahead.{name}": value for name, value in settings.items()})
        fetched[:] = [ebb.stats()["offload"]["bytes_fetched"]]
        h = x
        for module in modules:
            with ebb.region(INPUTS_LEAVE):
                h = module(h)
            h.register_hook(look)
        h.sum().backward()
        fetched.append(ebb.stats()["offload"]["bytes_fetched"])
        return [bytes - fetched[0] for bytes in fetched]

    expected = run(regions=0)
    assert run(regions=1, limit=0) == expected


def test_offloaded_value_is_freed_when_it_has_been_read(ahead, device):
    ebb.config.update(offload_min_bytes=1, offload_in_flight_bytes=0, offload_prefetch_bytes=0)
    policy = ebb.Policy({"aten::mm": ebb.OFFLOAD})
    bytes_in_use_between_regions(device, policy)
    ahead_of_backward = bytes_in_use_between_regions(device, policy)
    ebb.config.ahead.regions = 0
    without = bytes_in_use_between_regions(device, policy)
    assert ahead_of_backward - without == 8 * 1536  # eight results


def test_a_region_on_two_streams_is_left_to_backward(ahead, device):
    x, other = leaf(device, *X), torch.Stream(device=device)

    def program(entered):
        h = x
        for _ in range(3):
            with entered():
                a = WaitInBackward.apply(h).sin()
                own = torch.accelerator.current_stream()
                with late.behind(other, own):
                    b = (a * 2).sin().exp()
                own.wait_stream(other)
                h = (a + b).sin()
        return [h.detach(), *torch.autograd.grad(h.sum(), x)]

    did = counts(lambda: assert_exact(program))
    assert did["regions_in_time"] == 0
    assert did["regions_stopped"] > 0


def test_a_write_beside_a_replay_is_seen(ahead, device):
    """Eager gives a gradient here: it does not save the bias."""
    w, x = leaf(device, 8, 8), leaf(device, 4, 8)

    def write(bias):
        wait_for_replays()
        bias.add_(1)

    def program(entered):
        bias = torch.zeros(8, device=device)
        h = x
        for i in range(3):
            with entered():
                h = in_backward(h, functools.partial(write, bias)) if i == 2 else h
                h = (torch.mm(h, w) + bias).tanh().exp().log1p()
        return [h.detach(), *torch.autograd.grad(h.sum(), (x, w))]

    expected = found(program(contextlib.nullcontext))
    try:
        results = found(program(region))
    except RuntimeError as error:
        late.findings()  # what was read meanwhile is thrown away
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        assert all_same(results, expected)


def test_replay_ahead_without_memory_is_left_to_backward(ahead, device):
    """Then the step tries nothing else ahead."""
    modules, x = on(device, blocks(3)), leaf(device, *X)
    assert_exact(step_of(modules, x), 1)

    def program(entered):
        h = x
        for module in modules:
            meets = Squeeze if module is modules[-1] else WaitInBackward
            with entered():
                h = module(meets.apply(h))
        return backward(h.sum(), modules, x)

    with delays(2000):
        did = counts(lambda: assert_exact(program))
    assert did["failures"] == 3
    assert did["regions_in_time"] == 0


def test_a_wait_that_is_left_out_shows(ahead, device):
    modules, x = on(device, blocks(3)), leaf(device, *X)
    step = step_of(modules, x)
    expected = 2 * found(step(contextlib.nullcontext))

    missed = []
    for which, results, findings in late.each_wait_left_out(
        lambda: found([*step(region), *step(region)])
    ):
        if not findings and all_same(results, expected):
            missed.append(which)
    assert missed == [-1]  # which leaves out none


def test_host_waits_for_nothing_in_a_steady_step(ahead, device):
    modules, x = on(device, blocks(3)), leaf(device, *X)
    step = step_of(modules, x)
    for _ in range(3):
        step(region)
    wait_for_replays()
    torch.accelerator.synchronize()
    torch.ops.late.counts()
    step(region)
    wait_for_replays()
    assert torch.ops.late.counts().get("synchronize", 0) == 0


@needs_captures
def test_nothing_runs_ahead_while_a_graph_is_captured(ahead, device):
    modules, x = on(device, blocks(3)), leaf(device, *X)
    step = step_of(modules, x)
    expected = found(step(contextlib.nullcontext))
    stream = torch.Stream(device=device)
    late.synchronize()
    with stream:
        for _ in range(2):
            step(region)
    wait_for_replays()
    graph = late.Graph()
    before = ebb.stats()["ahead"]
    with graph.capture(stream):
        results = step(region)
    wait_for_replays()
    fates = ("regions_in_time", "regions_late", "regions_in_vain", "regions_stopped", "failures")
    assert {k: ebb.stats()["ahead"][k] for k in fates} == {k: before[k] for k in fates}
    for _ in range(2):
        graph.replay()
        assert all_same(found(results), expected)
