"""The waits of OFFLOAD: each is needed, and there are no more."""

from __future__ import annotations

import contextlib
import functools
import itertools

import pytest
import torch

import ebb
from ebb import _testing
from ebb_tests import device as late
from ebb_tests.device_leaves import (
    assert_gradient,
    assert_same,
    finish_copies,
    gradient,
    gradient_on_cpu,
    leaf,
)
from ebb_tests.programs.offloaded import OFFLOAD_ALL, SINES, chain_of_sines

# Each wait that is left out is found, as a race or as another gradient

SETTINGS = {
    "as it is": {},
    "in flight 0": {"in_flight_bytes": 0},
    "some in flight": {"in_flight_bytes": 1 << 11},
    "nothing ahead": {"prefetch_bytes": 0},
    "in flight 0, nothing ahead": {"in_flight_bytes": 0, "prefetch_bytes": 0},
    "keep last": {"keep_last": 2},
}


chain = functools.partial(chain_of_sines, length=2)


def plain(x, streams):
    with ebb.region(OFFLOAD_ALL):
        y = chain(x)
    return gradient(y, x)


def twice(x, streams):
    """Memory that one step has used is used by the next."""
    return plain(x, streams) + plain(x, streams)


def on_another_stream(x, streams):
    now = torch.accelerator.current_stream()
    with late.behind(streams[0], now):
        found = plain(x, streams)
    now.wait_stream(streams[0])
    found.record_stream(now)
    return found * 1


def joined(streams, found):
    """The sum of two gradients, on the stream that waits for those which computed them."""
    now = torch.accelerator.current_stream()
    for stream, one in zip(streams, found, strict=True):
        now.wait_stream(stream)
        one.record_stream(now)
    return found[0] + found[1]


def two_streams(x, streams):
    """What was packed on one is fetched ahead by the other's backward, and not taken from it."""
    now = torch.accelerator.current_stream()
    outputs = []
    for stream in streams:
        with late.behind(stream, now), ebb.region(SINES):
            outputs.append(chain(x))
    found = []
    for stream, y in reversed(list(zip(streams, outputs, strict=True))):
        with stream:
            found.append(gradient(y, x))
    return joined(reversed(streams), found)


def one_stream_after_the_other(x, streams):
    """The second uses the first one's host memory, and knows nothing of it."""
    found = []
    for stream in streams:
        with stream:
            found.append(plain(x, streams))
    return joined(streams, found)


def write(x, streams):
    with ebb.region(SINES):
        h = x.sin()
        h.cos()
        y = (h * 2).exp()
        with torch.no_grad():
            h.zero_()
    return gradient(y, x)


def part(x, streams):
    with ebb.region(SINES):
        y = x.sin()[:1].cos()
    return gradient(y, x)


def two_devices(x, streams):
    other = x.detach().to("late:1").requires_grad_()
    torch.accelerator.set_device_index(1)
    of_other = plain(other, streams)
    torch.accelerator.set_device_index(0)
    return plain(x, streams) + of_other.to(x.device)


PROGRAMS = {
    program.__name__: program
    for program in (
        *(plain, twice, on_another_stream, one_stream_after_the_other),
        *(two_streams, write, part, two_devices),
    )
}


# Where another wait is enough for some of them: of in for compute, if the memory that is taken was
# nobody's since in waited last; of compute for out, if a fetch follows before any allocation; of
# out for in, if one stream packs and takes back. Of each kind one that is needed is found in a
# program with several streams.
COVERED = {
    "in flight 0": set(PROGRAMS) - {"write"},
    "some in flight": set(PROGRAMS) - {"write", "part"},
    "in flight 0, nothing ahead": set(PROGRAMS) - {"write"},
}

STREAMS_OF_A_DEVICE = 33


def prepare(settings, device):
    _testing.drain_offload()
    ebb.config.update({f"offload.{name}": value for name, value in SETTINGS[settings].items()})
    ebb.config.offload.min_bytes = 1
    streams = [torch.Stream(device=device) for _ in range(2)]
    return leaf(device), streams


def use_what_is_free(stream):
    """Overwrites free memory of the stream, which knows nothing of the others. A tensor whose
    memory was freed too early changes."""
    with stream:
        kept = [torch.ones(rows, 32, device="late").mul_(3) for rows in [8] * 8 + [1] * 4]
    del kept


def run(program, x, streams, without):
    """With that wait left out: what it gave, what was found, and how many waits there were."""
    late.synchronize()
    ebb.stats()["offload"]  # what was used is given back
    late.findings()
    everywhere = (torch.accelerator.current_stream(), *streams)
    for stream in everywhere:
        use_what_is_free(stream)
    torch.ops.late.drop_wait(without)
    try:
        result = PROGRAMS[program](x, streams)
    finally:
        count = torch.ops.late.drop_wait(-1)
    for stream in everywhere:
        use_what_is_free(stream)
    late.synchronize()
    found = late.findings()
    return result.detach().cpu(), found, count


def kind_of_left_out(streams):
    """Which stream of a device was to wait for which, where "compute" is any of the program's.
    None: ebb's took no part."""
    computing = {stream.stream_id for stream in streams} | {0}
    numbers = [stream % STREAMS_OF_A_DEVICE for stream in torch.ops.late.left_out()]
    kind = tuple("compute" if number in computing else number for number in numbers)
    return None if kind == ("compute", "compute") else kind


@functools.cache
def kinds_of_waits(settings, program, device):
    """Of those that are found when they are left out, and of those that are not."""
    x, streams = prepare(settings, device)
    for _ in range(3):
        expected, found, count = run(program, x, streams, -1)
    assert found == []
    assert count > 0 or (program == "part" and "keep_last" in SETTINGS[settings])  # it stays
    seen, unseen = set(), set()
    for which in range(count):
        result, found, left_out = run(program, x, streams, which)
        asked_again = left_out > count  # the host did: it saw that it had not waited
        shows = found or asked_again or not torch.equal(result, expected)
        (seen if shows else unseen).add(kind_of_left_out(streams))
    run(program, x, streams, -1)
    return seen, unseen - {None}


def expected_gradient(program, x):
    computed = {
        "write": lambda x: (x.sin() * 2).exp(),
        "part": lambda x: x.sin()[:1].cos(),
    }.get(program, chain)
    found = gradient_on_cpu(computed, x)
    once = ("plain", "on_another_stream", "write", "part")
    return found if program in once else found + found


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("settings", SETTINGS)
def test_all_is_in_order(settings, program, device):
    x, streams = prepare(settings, device)
    expected = expected_gradient(program, x)
    for _ in range(2):
        result, found, _ = run(program, x, streams, -1)
        assert found == []
        assert torch.equal(result, expected)


def all_of_them():
    """Settings under which most programs need what others have shown take long: these are slow."""
    for settings, program in itertools.product(SETTINGS, PROGRAMS):
        is_slow = len(COVERED.get(settings, ())) > 2 and program in COVERED[settings]
        yield pytest.param(settings, program, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize(("settings", "program"), list(all_of_them()))
def test_a_wait_that_is_left_out_is_found(settings, program, device):
    _, unseen = kinds_of_waits(settings, program, device)
    if unseen and program in COVERED.get(settings, ()):
        for other in ("one_stream_after_the_other", "two_streams"):
            unseen -= kinds_of_waits(settings, other, device)[0]

    assert unseen == set()


# Several streams


@pytest.mark.parametrize("in_flight", [0, 1 << 30])
def test_kept_tensor_leaves_after_the_stream_that_packed_it(in_flight, streams, x, device):
    ebb.config.update(offload_keep_last=1, offload_in_flight_bytes=in_flight)
    inputs, outputs = (x, leaf(device)), []
    for stream, leaf_ in zip(streams, inputs, strict=True):
        with stream, ebb.region(SINES):  # keeps its sine, and sends the one before
            outputs.append(leaf_.sin().cos())
    finish_copies()
    for stream, leaf_, y in zip(streams, inputs, outputs, strict=True):
        with stream:
            found = torch.autograd.grad(y.sum(), leaf_)[0]
        assert_gradient(found, lambda x: x.sin().cos(), leaf_)


@pytest.mark.parametrize("at_once", [False, True], ids=["later", "at once"])
@pytest.mark.parametrize("keep_last", [0, 1])
def test_write_on_another_stream_comes_after_the_copy(keep_last, at_once, streams, x):
    """The copy back comes after the copy out, on a stream that knows nothing of the write."""
    ebb.config.offload.keep_last = keep_last
    with ebb.region(SINES):
        with streams[0]:
            h = x.sin()
            h.cos()  # saves h
            y = h.exp().cos()
        with late.behind(streams[1], streams[0]), torch.no_grad():
            h.zero_()
    if not at_once:
        torch.accelerator.synchronize()
    with streams[0]:
        found = torch.autograd.grad(y.sum(), x)[0]

    assert_gradient(found, lambda x: x.sin().exp().cos(), x)


def test_memory_of_a_tensor_that_a_write_sent_is_freed_after_the_copy(streams, x):
    """The writer waited for the copy, on its own stream; the memory is another stream's."""
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


@pytest.mark.parametrize("in_flight", [0, 1 << 30])
def test_value_that_leaves_at_region_end_leaves_after_the_stream_that_made_it(
    in_flight, streams, x
):
    """Only recipes read the value, so ebb sends it when the region ends. The stream that is current
    then has not waited for the stream that made the value."""
    ebb.config.offload.in_flight_bytes = in_flight

    def program(x):
        h = x.sin()
        return h.exp().cos()  # no numbers: for those the device would wait

    with ebb.region(SINES), streams[0]:
        y = program(x)
    finish_copies()
    with streams[0]:
        found = torch.autograd.grad(y.sum(), x)[0]

    assert_gradient(found, program, x)


def sines_in_regions_of_their_own(x, stream, count):
    """Cosines of sines that have left, in graphs that know of that stream only."""
    outputs = []
    for factor in range(1, count + 1):
        with stream, ebb.region(SINES):
            outputs.append((x * factor).sin().cos())
    finish_copies()
    return outputs


def test_memory_that_came_ahead_for_another_stream_is_freed_after_its_reader(streams, x):
    """The memory belongs to the first stream. The second stream still reads it when it is freed."""
    first, second = sines_in_regions_of_their_own(x, streams[1], 2)
    with streams[0]:
        _ = second.grad_fn._saved_self  # and the other one ahead
    with streams[1]:
        found = first.grad_fn._saved_self * 1
    del first
    use_what_is_free(streams[0])

    assert_same([found], x.detach().cpu().sin())


def test_tensor_fetched_on_one_stream_is_taken_by_another(streams, x, device):
    """Each call of the device fails once. The memory belongs to a third stream."""
    ebb.config.offload.prefetch_bytes = x.nbytes
    third = torch.Stream(device=device)
    calls, fails = 0, True
    while fails:
        outputs = sines_in_regions_of_their_own(x, third, 3)
        with streams[0]:
            _ = outputs[2].grad_fn._saved_self  # and the one before it ahead
        try:
            with streams[1], late.broken(after=calls):
                _ = outputs[1].grad_fn._saved_self  # and the first one ahead
            fails = False
        except RuntimeError:
            calls += 1
        with third:
            found = outputs[1].grad_fn._saved_self * 1
        streams[1].synchronize()  # the allocator knows that this one used it
        del _, outputs[1]
        use_what_is_free(streams[0])

        assert_same([found], (x.detach().cpu() * 2).sin())


def test_memory_of_a_dropped_fetch_is_reused_after_its_copy(streams, x):
    """On the device by the same stream, and on the host by another one."""
    ebb.config.offload.in_flight_bytes = 0
    with ebb.region(SINES), streams[0]:
        first = x.sin().cos()
        second = (x * 2).sin().cos()
    late.synchronize()
    ones = torch.ones_like(second)
    late.synchronize()
    with streams[0]:
        torch.autograd.grad(second, x, ones)  # and the first one ahead
    del first, second
    use_what_is_free(streams[0])
    with streams[1]:
        with ebb.region(SINES):
            y = chain(x)
        found = torch.autograd.grad(y.sum(), x)[0]

    assert_gradient(found, chain, x)


@pytest.mark.parametrize("in_flight", [0, 1 << 30])
def test_two_devices_do_not_share_host_memory_that_is_in_use(in_flight, device):
    _testing.drain_offload()
    ebb.config.update(offload_min_bytes=1, offload_in_flight_bytes=in_flight)
    inputs = [leaf(f"late:{i}") for i in range(2)]
    for _ in range(3):
        for x in inputs:
            torch.accelerator.set_device_index(x.device.index)
            with ebb.region(SINES):
                y = chain(x)
            x.found = gradient(y, x)
    torch.accelerator.set_device_index(0)
    late.synchronize()
    for x in inputs:
        assert_gradient(x.found, chain, x)


# There are no more than these


def step(x, region=None, length=8):
    with region or ebb.region(SINES):
        loss = chain_of_sines(x, length).sum()
    return torch.autograd.grad(loss, x)[0]


def counts_of_a_step(x, region=None):
    for _ in range(3):
        step(x, region)
    late.synchronize()
    torch.ops.late.counts()
    step(x, region)
    return torch.ops.late.counts()


def assert_host_asks_nothing(counts):
    assert not {"synchronize", "query"} & counts.keys()


@pytest.mark.parametrize("keep_last", [0, 2])
@pytest.mark.parametrize("prefetch", [0, 1 << 30])
@pytest.mark.parametrize("in_flight", [0, 1 << 30])
def test_host_neither_waits_nor_asks_in_a_steady_step(in_flight, prefetch, keep_last, x):
    ebb.config.update(
        offload_in_flight_bytes=in_flight,
        offload_prefetch_bytes=prefetch,
        offload_keep_last=keep_last,
    )
    counts = counts_of_a_step(x)

    assert_host_asks_nothing(counts)
    assert "event made" not in counts  # making one takes as long as recording it
    assert "allocate pinned" not in counts


def test_host_asks_nothing_of_what_is_never_fetched(x):
    ebb.config.offload.in_flight_bytes = 0
    step(x)
    late.synchronize()
    torch.ops.late.counts()
    with ebb.region(SINES):
        x.sin().cos().sin().cos()

    assert_host_asks_nothing(torch.ops.late.counts())


def test_device_waits_once_for_all_that_is_leaving(x):
    """And once for each tensor that backward takes before its copy is done."""
    ebb.config.offload.min_bytes = 1 << 30
    eager = counts_of_a_step(x)
    ebb.config.update(offload_min_bytes=1, offload_in_flight_bytes=1 << 30)
    counts = counts_of_a_step(x)

    assert counts["wait"] == eager.get("wait", 0) + 8 + 1


def test_recomputing_on_one_stream_needs_no_event(x):
    ebb.config.offload.min_bytes = 1 << 30
    counts = counts_of_a_step(x)
    eager = counts_of_a_step(x, contextlib.nullcontext())

    for what in ("record", "wait", "query", "synchronize"):
        assert counts.get(what, 0) == eager.get(what, 0)
