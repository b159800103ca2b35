"""An exception from a signal handler, between any two steps, leaves no region open."""

from __future__ import annotations

import random
import signal
import sys

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import ebb
from ebb import _C
from ebb._launch import takeover

INTERRUPTS = 2_000


class Interrupt(BaseException):
    pass


def body(x):
    return (x * 2).sin()


def with_block(x):
    with ebb.region():
        body(x)


def one_object(x, region=ebb.region(name="one")):  # noqa: B008
    with region:
        body(x)


def nested(x):
    with ebb.region(ebb.policies.save_all, name="outer"), ebb.region():
        body(x)


def decorated(x, inside=ebb.region()(body)):  # noqa: B008
    inside(x)


def checkpoint(x):
    ebb.checkpoint(body, x)


def placeholders(x, keeper=[None]):  # noqa: B006
    with ebb.region(escapes="placeholder") as region:
        keeper[0] = body(x)
        region.returns(keeper[0].cos())


def returned_placeholders(x):
    ebb.checkpoint(body, x, escapes="placeholder")


def opaque(x):
    with ebb.region():
        y = body(x)
        with ebb.opaque(y):
            pass


class Layer(nn.Module):
    def forward(self, x):
        return body(x)


MODEL = nn.Sequential(Layer(), Layer())
ebb.apply(MODEL, ebb.Policy([ebb.Rule("*", ebb.SAVE, module="0")]), "[01]")


def applied(x):
    MODEL(x)


def taken_over(x):
    """As with EBB=1."""
    torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)


def taken_over_by_name(x, model=nn.Sequential(Layer(), Layer())):  # noqa: B008
    """As with EBB_MODULES; what a job does when it first meets a model counts too."""
    model(x)


WAYS = [
    with_block,
    one_object,
    nested,
    decorated,
    checkpoint,
    placeholders,
    returned_placeholders,
    opaque,
    applied,
    taken_over,
    taken_over_by_name,
]


@pytest.fixture(autouse=True)
def job(request):
    """What EBB sets up, for those that need it."""
    way = request.node.callspec.params.get("way") if hasattr(request.node, "callspec") else None
    if way in (taken_over, taken_over_by_name):
        policy = ebb.policies.recompute_all
        takeover.install(policy, "1", ("[01]",) if way is taken_over_by_name else ())
        yield
        takeover.remove()
    else:
        yield


def assert_nothing_is_open(when):
    assert not _C.in_region(), when
    assert torch.is_grad_enabled(), when
    assert _C.running_module() == 0, when


@pytest.mark.parametrize("way", WAYS)
def test_a_signal_handler_that_raises(way):
    x = torch.ones(3, requires_grad=True)
    hits = 0

    def handle(*_):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handle)
    draw = random.Random(0)
    try:
        while hits < INTERRUPTS:
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 150e-6))
                for _ in range(1_000):  # Python drops what a handler raises in a destructor
                    way(x)
            except Interrupt:
                hits += 1
                if way is not taken_over:  # torch's own generator goes with the frames
                    assert_nothing_is_open(f"in the handler of interrupt {hits}")
            assert_nothing_is_open(f"after interrupt {hits}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    assert_nothing_is_open("after the last")


def ends_before(way, x, stop_at):
    """Runs `way` and raises at the `stop_at`-th bytecode instruction of Python code."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == stop_at:
                raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        way(x)
    except Interrupt:
        return False
    finally:
        sys.settrace(None)
    return True


# Between the call of __enter__ and the with block, and between the block and the call of __exit__,
# no signal handler runs, but a tracer does: the region is left when its object goes, so not before
# the exception and its frames have gone, and never while somebody else holds it.
@pytest.mark.parametrize("way", [way for way in WAYS if way is not one_object])
def test_an_exception_at_every_instruction(way):
    x = torch.ones(3, requires_grad=True)
    way(x)

    stop_at, ended = 0, False
    while not ended:
        stop_at += 1
        ended = ends_before(way, x, stop_at)
        assert_nothing_is_open(f"after an exception at instruction {stop_at}")

    assert stop_at > 10


class Raises(torch.Tensor):
    """A result whose class raises when it is looked at."""

    @property
    def requires_grad(self):
        raise Interrupt

    @property
    def layout(self):
        raise Interrupt


def test_a_result_whose_class_raises():
    x = torch.ones(3, requires_grad=True)

    with pytest.raises(Interrupt), ebb.region(escapes="placeholder") as region:
        region.returns(body(x).detach().as_subclass(Raises))

    assert not _C.in_region()


def test_a_warning_that_is_an_error_where_hooks_are_disabled(monkeypatch):
    monkeypatch.setattr(ebb.region, "_warn_hooks_disabled", lambda _: 1 / 0)

    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        with pytest.raises(ZeroDivisionError):
            ebb.region().__enter__()
        assert not _C.in_region()


def test_a_region_that_nobody_holds_is_left():
    ebb.region().__enter__()

    assert not _C.in_region()


def test_what_is_entered_cannot_be_made_anew():
    x = torch.ones(3)
    with ebb.region() as region, ebb.opaque(x) as writes:
        with pytest.raises(RuntimeError, match="__init__ was called on an open"):
            region.__init__(ebb.policies.save_all)
        with pytest.raises(RuntimeError, match="__init__ was called on an open"):
            writes.__init__(torch.ones(2))
