"""Each wait of OFFLOAD's is needed: left out, it is found, as a race or as another gradient."""

from __future__ import annotations

import functools

import pytest
import torch

import ebb
from ebb import _testing
from ebb_tests import device as late
from ebb_tests.device_leaves import gradient, gradient_on_cpu, leaf
from ebb_tests.programs.offloaded import SINES, chain_of_sines

EVERYTHING = ebb.Policy({"*": ebb.OFFLOAD}, inputs=ebb.OFFLOAD)

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
    with ebb.region(EVERYTHING):
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


def use_what_is_free(x, streams):
    """On each stream, which knows nothing of the others: who was given memory that another one
    still uses, or gets it next, meets this."""
    for stream in (torch.accelerator.current_stream(), *streams):
        with stream:
            kept = [torch.ones(rows, 32, device=x.device).mul_(3) for rows in [8] * 8 + [1] * 4]
    del kept


def run(program, x, streams, without):
    """With that wait left out: what it gave, what was found, and how many waits there were."""
    late.synchronize()
    ebb.stats()["offload"]  # what was used is given back
    late.findings()
    use_what_is_free(x, streams)
    torch.ops.late.drop_wait(without)
    try:
        result = PROGRAMS[program](x, streams)
    finally:
        count = torch.ops.late.drop_wait(-1)
    use_what_is_free(x, streams)
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
    for settings in SETTINGS:
        for program in PROGRAMS:
            is_slow = len(COVERED.get(settings, ())) > 2 and program in COVERED[settings]
            marks = [pytest.mark.slow] if is_slow else []
            yield pytest.param(settings, program, marks=marks)


@pytest.mark.parametrize(("settings", "program"), all_of_them())
def test_a_wait_that_is_left_out_is_found(settings, program, device):
    _, unseen = kinds_of_waits(settings, program, device)
    if unseen and program in COVERED.get(settings, ()):
        for other in ("one_stream_after_the_other", "two_streams"):
            unseen -= kinds_of_waits(settings, other, device)[0]

    assert unseen == set()
