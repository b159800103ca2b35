"""Replays ahead of backward on a device."""

from __future__ import annotations

import contextlib

import pytest
import torch

import ebb
from ebb_tests import device as late
from ebb_tests.device_leaves import needs_captures
from ebb_tests.exactness import same_bits
from ebb_tests.programs.ahead import (
    Squeeze,
    WaitInBackward,
    blocks,
    bytes_in_use_between_regions,
    counts,
    parameters,
)
from ebb_tests.replays import delays, wait_for_replays

RECOMPUTE = ebb.policies.recompute_all
INPUTS_LEAVE = ebb.Policy({"aten::native_layer_norm": ebb.OFFLOAD}, inputs=ebb.OFFLOAD)
SHAPE = (2, 6, 16)


def on(device, modules):
    return [module.to(device) for module in modules]


def leaf(device, *shape):
    return torch.randn(*(shape or SHAPE)).to(device).requires_grad_()


def chain(modules, x, region, waits=True):
    for module in modules:
        with region():
            x = module(WaitInBackward.apply(x) if waits else x)
    return x


def region():
    return ebb.region(RECOMPUTE)


def backward(loss, modules, *more):
    return [loss.detach(), *torch.autograd.grad(loss, [*parameters(modules), *more])]


def found(tensors):
    torch.accelerator.synchronize()
    return [t.cpu() for t in tensors]


def assert_exact(program, steps=3):
    torch.manual_seed(3)
    expected = found(program(contextlib.nullcontext))
    for _ in range(steps):
        torch.manual_seed(3)
        assert all(map(same_bits, found(program(region)), expected))


@pytest.mark.parametrize("waits", [False, True])
def test_a_chain(ahead, device, waits):
    modules, x = on(device, blocks(4)), leaf(device)

    def program(entered):
        return backward(chain(modules, x, entered, waits).sum(), modules, x)

    did = counts(lambda: assert_exact(program))
    assert did["failures"] == 0
    assert not waits or did["regions_in_time"] == 9


@pytest.mark.parametrize(("compute", "side"), [(0, 0), (300, 0), (0, 300), (200, 200)])
def test_streams_run_late_at_random(ahead, device, compute, side):
    modules, x = on(device, blocks(4)), leaf(device)
    with late.delayed(compute, side):
        assert_exact(lambda entered: backward(chain(modules, x, entered, False).sum(), modules, x))


@pytest.mark.parametrize("at_once", [False, True], ids=["in turn", "all forwards first"])
def test_streams_of_the_programs_own(at_once, ahead, device):
    """If all forwards come first, nothing is recorded between the backwards."""
    modules = on(device, blocks(3))
    streams = [torch.Stream(device=device) for _ in range(2)]
    xs = [leaf(device) for _ in streams]
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


def test_an_escape_that_was_replayed_ahead_is_for_the_stream_that_asks_first(ahead, device):
    """Though what that asks for is an input, which was not replayed."""
    streams = [torch.Stream(device=device) for _ in range(2)]
    x, factor = leaf(device), leaf(device)
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
    x = leaf(device)

    def program(entered):
        h = chain(near, x, entered)
        h = chain(far, h.to(other), entered)
        return backward(h.sum(), [*near, *far], x)

    assert_exact(program)


def test_masks_that_have_a_generator_are_drawn_again(ahead, device):
    modules, x = on(device, blocks(3, dropout=0.4)), leaf(device)
    assert_exact(lambda entered: backward(chain(modules, x, entered).sum(), modules, x))


def test_writes_in_place(ahead, device):
    x, w = leaf(device, 5, 5), leaf(device, 5, 5)

    def program(entered):
        h = x
        for _ in range(4):
            with entered():
                y = (WaitInBackward.apply(h) @ w).relu_()
                y = y.mul(2).add_(1).sigmoid_() * y
                h = y + h
        return [h.detach(), *torch.autograd.grad(h.sum(), (x, w))]

    assert_exact(program)


@pytest.mark.parametrize("prefetch", [0, 1 << 30])
def test_offloaded_inputs_come_back_ahead(prefetch, ahead, device):
    """On its own stream too: the first fetch of a backward finds nothing that came ahead."""
    ebb.config.update(
        offload_min_bytes=1, offload_in_flight_bytes=0, offload_prefetch_bytes=prefetch
    )
    modules, x = on(device, blocks(4)), leaf(device)

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
    modules, x = on(device, blocks(2)), leaf(device)
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


def test_what_was_offloaded_and_has_been_read_is_gone(ahead, device):
    ebb.config.update(offload_min_bytes=1, offload_in_flight_bytes=0, offload_prefetch_bytes=0)
    policy = ebb.Policy({"aten::mm": ebb.OFFLOAD})
    bytes_in_use_between_regions(device, policy)
    ahead_of_backward = bytes_in_use_between_regions(device, policy)
    ebb.config.ahead.regions = 0
    without = bytes_in_use_between_regions(device, policy)
    assert ahead_of_backward - without == 8 * 1536  # eight results


def test_a_region_on_two_streams_is_left_to_backward(ahead, device):
    x, other = leaf(device), torch.Stream(device=device)

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

    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, bias):
            ctx.bias = bias
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            wait_for_replays()
            ctx.bias.add_(1)
            return gradient, None

    def program(entered):
        bias = torch.zeros(8, device=device)
        h = x
        for i in range(3):
            with entered():
                h = Writes.apply(h, bias) if i == 2 else h
                h = (torch.mm(h, w) + bias).tanh().exp().log1p()
        return [h.detach(), *torch.autograd.grad(h.sum(), (x, w))]

    expected = found(program(contextlib.nullcontext))
    try:
        results = found(program(region))
    except RuntimeError as error:
        message = str(error)
        late.findings()  # what was read meanwhile is thrown away
    else:
        assert all(map(same_bits, results, expected))
        return
    assert "modified by an inplace operation" in message


def test_no_memory_ahead_is_no_failure(ahead, device):
    """After it nothing of that step is tried ahead."""
    modules, x = on(device, blocks(3)), leaf(device)
    assert_exact(lambda entered: backward(chain(modules, x, entered).sum(), modules, x), 1)

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


def test_each_wait_matters(ahead, device):
    modules, x = on(device, blocks(3)), leaf(device)
    expected = backward(chain(modules, x, contextlib.nullcontext).sum(), modules, x)
    expected = 2 * found(expected)

    def program():
        steps = [backward(chain(modules, x, region).sum(), modules, x) for _ in range(2)]
        return found([result for step in steps for result in step])

    missed = []
    for which, results, findings in late.each_wait_left_out(program):
        if not findings and all(map(same_bits, results, expected)):
            missed.append(which)
    assert missed == [-1]  # which leaves out none


def test_steady_state_asks_and_waits_for_nothing(ahead, device):
    modules, x = on(device, blocks(3)), leaf(device)

    def step():
        chain(modules, x, region).sum().backward()

    for _ in range(3):
        step()
    wait_for_replays()
    torch.accelerator.synchronize()
    torch.ops.late.counts()
    step()
    wait_for_replays()
    assert torch.ops.late.counts().get("synchronize", 0) == 0


@needs_captures
def test_nothing_runs_ahead_while_a_graph_is_captured(ahead, device):
    modules, x = on(device, blocks(3)), leaf(device)

    def step():
        return backward(chain(modules, x, region).sum(), modules, x)

    expected = found(backward(chain(modules, x, contextlib.nullcontext).sum(), modules, x))
    stream = torch.Stream(device=device)
    late.synchronize()
    with stream:
        for _ in range(2):
            step()
    wait_for_replays()
    graph = late.Graph()
    before = ebb.stats()["ahead"]
    with graph.capture(stream):
        results = step()
    wait_for_replays()
    fates = ("regions_in_time", "regions_late", "regions_in_vain", "regions_stopped", "failures")
    assert {k: ebb.stats()["ahead"][k] for k in fates} == {k: before[k] for k in fates}
    for _ in range(2):
        graph.replay()
        assert all(map(same_bits, found(results), expected))
