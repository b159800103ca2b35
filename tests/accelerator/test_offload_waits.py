"""Each wait of OFFLOAD's is needed: left out, it is found, as a race or as another gradient."""

from __future__ import annotations

import gc

import accelerator
import pytest
import torch

import ebb

SINES = ebb.Policy({"aten::sin": ebb.OFFLOAD})
EVERYTHING = ebb.Policy({"*": ebb.OFFLOAD}, inputs=ebb.OFFLOAD)

SETTINGS = {
    "as it is": {},
    "in flight 0": {"in_flight_bytes": 0},
    "some in flight": {"in_flight_bytes": 1 << 12},
    "nothing ahead": {"prefetch_bytes": 0},
    "in flight 0, nothing ahead": {"in_flight_bytes": 0, "prefetch_bytes": 0},
    "keep last": {"keep_last": 2},
    "static": {"static": True},
    "static, in flight 0": {"static": True, "in_flight_bytes": 0},
    "static, nothing ahead": {"static": True, "in_flight_bytes": 0, "prefetch_bytes": 0},
    "static, keep last": {"static": True, "keep_last": 2},
}


def chain(x, length=3):
    for _ in range(length):
        x = x.sin().cos()
    return x


def plain(x, streams):
    with ebb.region(EVERYTHING):
        y = chain(x)
    return torch.autograd.grad(y, x, torch.ones_like(y))[0]


def twice(x, streams):
    """Memory that one step has used is used by the next."""
    return plain(x, streams) + plain(x, streams)


def on_another_stream(x, streams):
    now = torch.accelerator.current_stream()
    streams[0].wait_stream(now)
    with streams[0]:
        found = plain(x, streams)
    now.wait_stream(streams[0])
    found.record_stream(now)
    return found * 1


def two_streams(x, streams):
    """What was packed on one is fetched ahead by the other's backward, and not taken from it."""
    now = torch.accelerator.current_stream()
    outputs = []
    for stream in streams:
        stream.wait_stream(now)
        with stream, ebb.region(SINES):
            outputs.append(chain(x))
    found = []
    for stream, y in reversed(list(zip(streams, outputs, strict=True))):
        with stream:
            found.append(torch.autograd.grad(y, x, torch.ones_like(y))[0])
    for stream, gradient in zip(reversed(streams), found, strict=True):
        now.wait_stream(stream)
        gradient.record_stream(now)
    return found[0] + found[1]


def one_stream_after_the_other(x, streams):
    """The second uses the first one's host memory, and knows nothing of it."""
    found = []
    for stream in streams:
        with stream:
            found.append(plain(x, streams))
    now = torch.accelerator.current_stream()
    for stream, gradient in zip(streams, found, strict=True):
        now.wait_stream(stream)
        gradient.record_stream(now)
    return found[0] + found[1]


def write(x, streams):
    with ebb.region(SINES):
        h = x.sin()
        h.cos()
        y = (h * 2).exp()
        with torch.no_grad():
            h.zero_()
    return torch.autograd.grad(y, x, torch.ones_like(y))[0]


def part(x, streams):
    with ebb.region(SINES):
        y = x.sin()[:1].cos()
    return torch.autograd.grad(y, x, torch.ones_like(y))[0]


def two_devices(x, streams):
    other = x.detach().to("late:1").requires_grad_()
    torch.accelerator.set_device_index(1)
    of_other = plain(other, streams)
    torch.accelerator.set_device_index(0)
    return plain(x, streams) + of_other.to(x.device)


PROGRAMS = {
    program.__name__: program
    for program in (
        plain,
        twice,
        on_another_stream,
        one_stream_after_the_other,
        two_streams,
        write,
        part,
        two_devices,
    )
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_wait_that_is_left_out_is_found(settings, program, device):
    ebb._C._testing.drain_offload()
    ebb.offload.configure(min_bytes=1, **settings)
    streams = [torch.Stream(device=device) for _ in range(2)]
    x = torch.randn(8, 32).to(device).requires_grad_()
    for _ in range(2):
        program(x, streams)

    def run():
        accelerator.synchronize()
        gc.collect()
        ebb.offload.stats()  # all is given back
        accelerator.findings()
        torch.ops.late.drop_wait(which[0])
        return program(x, streams)

    which = [-1]
    expected, unseen = None, []
    count = 0
    while which[0] < count:
        torch.ops.late.drop_wait(-1)
        result = run()
        left_out = torch.ops.late.drop_wait(-1)
        accelerator.synchronize()
        found = accelerator.findings()
        result = result.detach().cpu()
        if which[0] < 0:
            assert found == []
            expected, count = result, left_out
        elif not found and torch.equal(result, expected):
            unseen.append(which[0])
        which[0] += 1

    assert count > 0
    assert unseen == []
    accelerator.synchronize()
    ebb._C._testing.drain_offload()
    accelerator.findings()
