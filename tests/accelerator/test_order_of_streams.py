"""Bytes that one stream has made, and another one uses: the order between them, and who gets the
memory next."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb_tests import device as late
from ebb_tests.device_leaves import assert_gradient, assert_same, finish_copies


@pytest.fixture
def streams(device):
    return [torch.Stream(device=device) for _ in range(3)]


def before(y):
    """The function whose result `y` shows."""
    return y.grad_fn.next_functions[0][0]


def test_who_used_it_in_forward_waits_for_it_in_backward(streams, x):
    with ebb.region():
        with streams[0]:
            h = x.sin()
        with late.behind(streams[1], streams[0]):
            second = h.sinh() * 1
        del h
    late.synchronize()
    with streams[0]:
        first = before(second)._saved_self * 1
    with streams[1]:
        found = before(second)._saved_self * 1

    assert_same([first, found], x.detach().cpu().sin())


def test_more_streams_than_are_told_apart(device, x):
    """Each of them waits."""
    streams = [torch.Stream(device=device) for _ in range(10)]
    with ebb.region():
        with streams[0]:
            h = x.sin()
        outputs = []
        for stream in streams:
            with late.behind(stream, streams[0]):
                outputs.append(h.cos() * 1)
        del h
    late.synchronize()
    found = []
    for stream, y in zip(streams, outputs, strict=True):
        with stream:
            found.append(before(y)._saved_self * 1)

    assert_same(found, x.detach().cpu().sin())


def test_a_saved_tensor_that_needs_no_gradient_is_unpacked_twice(streams, x):
    """It is the same tensor; who asks second waits too."""
    with ebb.region():
        with streams[0]:
            with torch.no_grad():
                factor = (x * 2).sin()
            y = x * factor
            del factor
        with late.behind(streams[1], streams[0]):
            y.cos()
    late.synchronize()
    found = []
    for stream in streams[:2]:
        with stream:
            found.append(y.grad_fn._saved_other * 1)

    assert_same(found, (x.detach().cpu() * 2).sin())


def test_a_copy_for_recipes_was_made_on_another_stream(streams, x):
    """Since backward may write to what it unpacks, which lives and was not made by ebb."""
    with ebb.region():
        with streams[0]:
            h = x.sin()
            first = h.cos() * 1
        with late.behind(streams[1], streams[0]):
            second = (h * 2).cos() * 1
    late.synchronize()
    with streams[0]:
        saved = before(first)._saved_self * 1
    with streams[1]:
        found = before(second)._saved_self * 1

    assert_same([saved], h.detach().cpu())
    assert_same([found], h.detach().cpu() * 2)


def test_what_comes_back_where_it_was_discarded_is_for_all_streams(streams, x):
    """Its readers outside of the region save its storage, and never ask ebb; nor do they wait for
    backward, since forward made it."""
    with ebb.region():
        with streams[0]:
            y = ebb.experimental.discardable(x.tanh())
        for stream in streams[1:3]:
            with late.behind(stream, streams[0]):
                (x * 2).cos()
    with streams[0]:
        h = y.sin()
    with late.behind(streams[1], streams[0]):
        z = h * 1
    ebb.experimental.discard(y, restore_at=z)
    late.synchronize()
    ones = torch.ones_like(z)
    late.synchronize()
    with streams[1]:
        torch.autograd.grad(z, h, ones, retain_graph=True)
    found = []
    for stream in (streams[0], streams[2]):
        with stream:
            found.append(y * 1)

    assert_same(found, x.detach().cpu().tanh())


def test_a_filled_escape_is_for_all_streams(streams, x):
    """Also for those that no gradient passed through."""
    with ebb.region(escapes="placeholder"):
        with streams[0]:
            h = x.sin()
            escaped = h.detach()
            y = h.cos() * 1
            del h
        with late.behind(streams[1], streams[0]):
            escaped.cos()
    late.synchronize()
    with streams[0]:
        first = before(y)._saved_self * 1
    with streams[1]:
        second = escaped * 1

    assert_same([first, second], x.detach().cpu().sin())


def test_a_filled_escape_is_not_for_streams_of_another_device(streams, x):
    """They would wait for what is none of theirs."""

    def waits(other):
        with ebb.region(escapes="placeholder"):
            with streams[0]:
                h = x.sin()
                escaped = h.detach()
                y = h.cos() * 1
                del h
            with late.behind(streams[1], streams[0]):
                escaped.cos()
            other.cos()
        late.synchronize()
        torch.ops.late.counts()
        with streams[0]:
            _ = before(y)._saved_self
        return torch.ops.late.counts().get("wait", 0)

    elsewhere = x.detach().to("late:1")
    late.synchronize()
    assert waits(elsewhere) == waits(x.detach().cpu())


def test_a_copy_before_a_write_was_made_on_another_stream(streams, x):
    """The writer's; recipes that read the copy run on another one, which need not know of the
    write."""
    with torch.no_grad():
        term = torch.rand(8, 32).to(x.device)
    numbers = term.cpu()
    late.synchronize()
    with ebb.region():
        with streams[0]:
            y = (x + term).sin()  # saves the sum, not the term
        with late.behind(streams[1], streams[0]), torch.no_grad():
            term.zero_()
    ones = torch.ones_like(y)
    torch.accelerator.current_stream().synchronize()
    with streams[0]:
        found = torch.autograd.grad(y, x, ones)[0]

    assert_same([found], (x.detach().cpu() + numbers).cos())


def test_more_makers_than_are_told_apart(device, x):
    """Who asks for what one of the last ones made waits for all of those."""
    elsewhere = [torch.Stream(device="late:1") for _ in range(24)]
    here = [torch.Stream(device=device) for _ in range(12)]
    other = x.detach().to("late:1")
    late.synchronize()
    with ebb.region():
        for stream in elsewhere:
            with stream:
                other.cos()
        outputs = []
        for stream in here:
            with stream:
                outputs.append(x.sin().cos() * 1)
    late.synchronize()
    found = []
    for maker, asker, y in zip(here, (*here[1:], here[0]), outputs, strict=True):
        with maker:
            _ = before(y)._saved_self
        with asker:
            found.append(before(y)._saved_self * 1)

    assert_same(found, x.detach().cpu().sin())


# Who gets the memory next


SINES = ebb.Policy({"aten::sin": ebb.OFFLOAD})


def use_what_is_free(stream):
    """Reuses and overwrites free memory. A tensor whose memory was freed too early changes."""
    with stream:
        kept = [torch.ones(8, 32, device="late").mul_(3) for _ in range(8)]
    del kept


def ones_for(*outputs):
    ones = [torch.ones_like(y) for y in outputs]
    late.synchronize()
    return ones


def sines_in_regions_of_their_own(x, stream, count):
    """Cosines of sines that have left, in graphs that know of that stream only."""
    outputs = []
    for factor in range(1, count + 1):
        with stream, ebb.region(SINES):
            outputs.append((x * factor).sin().cos())
    finish_copies()
    return outputs


def test_memory_that_came_ahead_for_another_stream(streams, x):
    """The memory belongs to the first stream. The second stream still reads it when it is freed."""
    first, second = sines_in_regions_of_their_own(x, streams[1], 2)
    with streams[0]:
        _ = second.grad_fn._saved_self  # and the other one ahead
    with streams[1]:
        found = first.grad_fn._saved_self * 1
    del first
    use_what_is_free(streams[0])

    assert_same([found], x.detach().cpu().sin())


def test_fetched_on_one_stream_and_asked_for_again_on_another(streams, x):
    """Whichever call of the device failed the first time. The memory belongs to a third stream."""
    ebb.config.offload.prefetch_bytes = x.nbytes
    calls, fails = 0, True
    while fails:
        outputs = sines_in_regions_of_their_own(x, streams[2], 3)
        with streams[0]:
            _ = outputs[2].grad_fn._saved_self  # and the one before it ahead
        try:
            with streams[1], late.broken(after=calls):
                _ = outputs[1].grad_fn._saved_self  # and the first one ahead
            fails = False
        except RuntimeError:
            calls += 1
        with streams[2]:
            found = outputs[1].grad_fn._saved_self * 1
        streams[1].synchronize()  # the allocator knows that this one used it
        del _, outputs[1]
        use_what_is_free(streams[0])

        assert_same([found], (x.detach().cpu() * 2).sin())


def test_a_replay_writes_to_a_copy_of_what_another_stream_made(streams, x):
    """The first stream may still read the bytes, although no handle needs them any more."""
    with ebb.region():
        with streams[0]:
            h = x.sin() * 2
            first = h.tanh() * 1  # a replay of tanh's result recomputes h, which mul_ overwrites
        with late.behind(streams[1], streams[0]):
            h.mul_(3).add_(1)
            second = h.cos()
        del h
    ones = ones_for(second)
    with streams[0]:
        saved = first.grad_fn.next_functions[0][0]._saved_result
    with streams[1]:
        of_second = torch.autograd.grad(second, x, ones)[0]

    assert_same([saved], (x.detach().cpu().sin() * 2).tanh())
    assert_gradient(of_second, lambda x: (x.sin() * 2 * 3 + 1).cos(), x)


def test_memory_of_a_filled_escape_is_used_by_the_stream_that_made_it(streams, x):
    """No record_stream() is called, since in eager the memory is that stream's own. With ebb, it
    belongs to the stream on which backward ran."""
    with ebb.region(escapes="placeholder"):
        with streams[0]:
            h = x.sin()
            escaped = h.detach()
        with late.behind(streams[1], streams[0]):
            y = (h * 2).cos()
        del h
    ones = ones_for(y)
    with streams[1]:
        found = torch.autograd.grad(y, x, ones)[0]
    with streams[0]:
        read = escaped * 1
    del escaped
    use_what_is_free(streams[1])

    assert_same([read], x.detach().cpu().sin())
    assert_gradient(found, lambda x: (x.sin() * 2).cos(), x)


def test_a_stream_that_comes_later_waits_for_a_filled_escape(streams, x, device):
    """All streams waited that there were when it was filled."""
    with ebb.region(escapes="placeholder"), streams[0]:
        h = x.sin()
        escaped = h.detach()
        y = h.cos() * 1
        del h
    late.synchronize()
    node = y.grad_fn.next_functions[0][0]
    with streams[1]:
        first = node._saved_self * 1
    with torch.Stream(device=device):
        second = node._saved_self * 1

    assert_same([first, second, escaped], x.detach().cpu().sin())


def test_what_left_early_is_freed_after_the_copy(streams, x):
    """A write waited for that, on its own stream; the memory is another stream's."""
    with ebb.region(SINES):
        with streams[0]:
            h = x.sin()
            h.cos()  # sends it
            y = h.exp().cos()
        with late.behind(streams[1], streams[0]), torch.no_grad():
            h.zero_()
        streams[0].wait_stream(streams[1])
    del h
    use_what_is_free(streams[0])
    with streams[0]:
        found = torch.autograd.grad(y.sum(), x)[0]

    assert_gradient(found, lambda x: x.sin().exp().cos(), x)


def test_what_is_dropped_on_its_way_back(streams, x):
    """Its memory is used again after the copy: on the device, and on the host by another stream."""
    ebb.config.offload.in_flight_bytes = 0
    with ebb.region(SINES), streams[0]:
        first = x.sin().cos()
        second = (x * 2).sin().cos()
    late.synchronize()
    ones = ones_for(second)
    with streams[0]:
        torch.autograd.grad(second, x, ones)  # and the first one ahead
    del first, second
    use_what_is_free(streams[0])
    with streams[1], ebb.region(SINES):
        y = x.sin().cos().sin().cos()
    with streams[1]:
        found = torch.autograd.grad(y.sum(), x)[0]

    assert_gradient(found, lambda x: x.sin().cos().sin().cos(), x)


def test_what_was_fetched_is_not_sent_any_more(x):
    """It was among the last ones."""
    ebb.config.offload.keep_last = 1
    with ebb.region(SINES):
        y = x.sin().cos()
    late.synchronize()
    _ = y.grad_fn._saved_self
    before = ebb.stats()["offload"]["bytes_sent"]
    with ebb.region(SINES):
        z = x.sin().cos()  # is the last one now

    assert ebb.stats()["offload"]["bytes_sent"] == before
    assert_same([y.grad_fn._saved_self], x.detach().cpu().sin())
    del z
