"""The test device finds the errors that it must find."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest
import torch

from ebb_tests import TESTS
from ebb_tests import device as late


def capture(stream, act):
    with late.Graph().capture(stream) as graph:
        act()
    return graph


def found(kind):
    """Takes what was found; all of it must be of this kind, and there must be some."""
    findings = late.findings()
    return bool(findings) and all(kind in one for one in findings)


def test_the_host_cannot_touch_its_memory():
    program = (
        "import ctypes, torch\n"
        "from ebb_tests import device as late\n"
        "x = torch.ones(4).to(late.load())\n"
        "torch.accelerator.synchronize()\n"
        "print(ctypes.c_float.from_address(torch.ops.late.kernel_address(x)).value, flush=True)\n"
        "print(ctypes.c_float.from_address(x.data_ptr()).value)\n"
    )
    # what a sanitizer would report here is meant to happen
    options = os.environ.get("ASAN_OPTIONS", "") + ":handle_segv=0"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=TESTS,
        env=os.environ | {"ASAN_OPTIONS": options},
        capture_output=True,
        text=True,
    )

    assert done.stdout == "1.0\n"
    assert done.returncode == -11  # SIGSEGV


def test_nothing_runs_before_somebody_waits(device):
    x = torch.zeros(4).to(device)
    y = x + 1
    done = torch.Event(device=device)
    done.record()
    before = done.query()
    done.synchronize()

    assert not before
    assert done.query()
    assert torch.equal(y.cpu(), torch.ones(4))


def test_delayed_streams_run_by_themselves(device):
    with late.delayed(0, 100):
        x = torch.zeros(4).to(device)
        for _ in range(20):
            x = x + 1
        done = torch.Event(device=device)
        done.record()
        while not done.query():
            pass
    assert torch.equal(x.cpu(), torch.full((4,), 20.0))


def test_a_read_before_the_write_is_found(device, streams):
    with streams[0]:
        x = torch.ones(4).to(device) * 2
    with streams[1]:
        y = x + 1

    assert found("write and read")
    late.synchronize()
    del y


def test_a_write_before_the_read_is_found(device, streams):
    x = torch.ones(4).to(device)
    torch.accelerator.synchronize()
    with streams[0]:
        y = x + 1
    x.mul_(2)

    assert found("read and write")
    del y


@pytest.mark.parametrize("how", ["stream", "event", "host"])
def test_an_order_is_seen(how, device, streams):
    with streams[0]:
        x = torch.ones(4).to(device) * 2
        done = torch.Event(device=device)
        done.record()
    if how == "stream":
        streams[1].wait_stream(streams[0])
    elif how == "event":
        streams[1].wait_event(done)
    else:
        done.synchronize()
    with streams[1]:
        y = x + 1

    torch.accelerator.synchronize()
    assert late.findings() == []
    assert torch.equal(y.cpu(), torch.full((4,), 3.0))


def test_free_while_another_stream_reads_is_found(device, streams):
    with streams[0]:
        x = torch.ones(4).to(device) * 2
    streams[1].wait_stream(streams[0])
    with streams[1]:
        y = x + 1
    del x

    assert found("then free")
    del y


def test_record_stream_keeps_memory(device, streams):
    with streams[0]:
        x = torch.ones(4).to(device) * 2
    streams[1].wait_stream(streams[0])
    with streams[1]:
        y = x + 1
    x.record_stream(streams[1])
    address = x.data_ptr()
    del x
    with streams[0]:
        early = torch.empty(4, device=device)
        assert early.data_ptr() != address
        streams[1].synchronize()
        other = torch.empty(4, device=device)
        assert other.data_ptr() == address

    streams[0].synchronize()
    assert torch.equal(y.cpu(), torch.full((4,), 3.0))


def test_freed_memory_is_poisoned(device):
    x = torch.ones(4).to(device)
    del x
    y = torch.empty(4, device=device)

    assert y.isnan().all()


def test_pinned_memory_freed_under_a_copy_is_found(device):
    x = torch.ones(64).to(device)
    y = torch.empty(64, pin_memory=True)
    y.copy_(x, non_blocking=True)
    del y

    assert found("free of pinned memory")


def test_pinned_memory_read_too_early_is_found(device):
    x = torch.ones(64).to(device)
    y = torch.empty(64, pin_memory=True)
    y.copy_(x, non_blocking=True)
    torch.ops.late.host_uses(y, False)

    assert found("the host")
    torch.accelerator.synchronize()


def test_calls_are_counted(device, streams):
    torch.ops.late.counts()
    streams[0].wait_stream(streams[1])
    streams[0].synchronize()
    streams[0].query()
    counts = torch.ops.late.counts()

    assert [counts[what] for what in ("record", "wait", "synchronize", "query")] == [1] * 4
    assert torch.ops.late.counts() == {}


def test_each_wait_that_is_left_out_is_found(device, streams):
    x = torch.ones(4).to(device)
    torch.accelerator.synchronize()

    def program():
        with streams[0]:
            y = x * 2
        streams[1].wait_stream(streams[0])
        with streams[1]:
            z = y + 1
        streams[0].wait_stream(streams[1])
        with streams[0]:
            done = torch.Event(device=device)
            done.record()
        done.synchronize()
        return z.cpu()

    runs = list(late.each_wait_left_out(program))

    assert len(runs) == 4
    assert not runs[0][2]
    assert all(findings for _, _, findings in runs[1:])


FORBIDDEN = {
    "synchronize": lambda x, outside: torch.accelerator.synchronize(),
    "the host waits for an event": lambda x, outside: outside.synchronize(),
    "a query": lambda x, outside: outside.query(),
    "a stream that waits for outside": lambda x, outside: (
        torch.accelerator.current_stream().wait_event(outside)
    ),
    "a copy that the host waits for": lambda x, outside: x.cpu(),
    "item": lambda x, outside: x[0].item(),
    "nonzero": lambda x, outside: x.nonzero(),
    "pinned memory": lambda x, outside: torch.empty(4, pin_memory=True),
    "a generator of one's own": lambda x, outside: x.bernoulli_(
        0.5, generator=torch.Generator(x.device)
    ),
}


class TestGraphs:
    @pytest.fixture
    def x(self, device):
        x = torch.ones(4).to(device)
        torch.accelerator.synchronize()
        return x

    def test_a_missing_order_inside_is_found(self, x, streams):
        with late.Graph().capture(streams[0]):
            streams[1].wait_stream(streams[0])
            y = x * 2
            with streams[1]:
                y + 1
            streams[0].wait_stream(streams[1])

        assert found("write and read")

    def test_replays_draw_the_next_random_numbers(self, device, streams):
        with late.Graph().capture(streams[0]) as graph:
            x = torch.empty(4, device=device).uniform_()
            y = torch.empty(4, device=device).uniform_()
        torch.late.manual_seed(3)
        replayed = []
        for _ in range(2):
            graph.replay()
            replayed += [x.cpu(), y.cpu()]
        torch.late.manual_seed(3)
        eager = [torch.empty(4, device=device).uniform_().cpu() for _ in range(4)]

        assert all(torch.equal(*both) for both in zip(replayed, eager, strict=True))

    @pytest.mark.parametrize("act", FORBIDDEN.values(), ids=FORBIDDEN)
    def test_calls_that_cuda_forbids_in_a_capture_raise(self, act, x, streams):
        outside = torch.Event(device=x.device)
        outside.record()
        with pytest.raises(RuntimeError, match="captur"):
            capture(streams[0], lambda: act(x, outside))

        assert torch.equal((x + 1).cpu(), torch.full((4,), 2.0))  # all is well again

    def test_caught_error_still_breaks_a_capture(self, x, streams):
        def asks():
            with contextlib.suppress(RuntimeError):
                streams[1].query()

        with pytest.raises(RuntimeError, match="invalidated"):
            capture(streams[0], asks)

    def test_capture_with_unjoined_work_raises(self, x, streams):
        def leaves():
            streams[1].wait_stream(streams[0])
            with streams[1]:
                x + 1

        with pytest.raises(RuntimeError, match="did not wait for"):
            capture(streams[0], leaves)

    def test_an_event_of_a_capture_cannot_be_waited_for_later(self, x, streams):
        inside = torch.Event(device=x.device)
        with late.Graph().capture(streams[0]):
            inside.record()
        with pytest.raises(RuntimeError, match="of a capture that is over"):
            streams[1].wait_event(inside)

    def test_memory_that_a_graph_uses_and_that_was_freed_is_found(self, device, streams):
        x = torch.ones(4).to(device)
        torch.accelerator.synchronize()
        with late.Graph().capture(streams[0]) as graph:
            y = x * 2
        del x
        graph.replay()

        assert any("a graph uses memory that was freed" in one for one in late.findings())
        del y
