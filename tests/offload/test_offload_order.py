"""OFFLOAD: copies, streams and writes in every order."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import ebb
from ebb_tests.exactness import leaves, run, same_bits
from ebb_tests.programs.offloaded import (
    OFFLOAD_ALL,
    SINES,
    assert_exact,
    chain_of_sines,
    finish_copies,
    forward,
    gradients,
    overwritten,
    sine_and_cosine,
)
from ebb_tests.stand_ins import fake_accelerator


def test_profilers_see_the_region_of_each_copy(accelerator, x):
    with profile(activities=[ProfilerActivity.CPU]) as found:
        loss = forward(x, 2, name="layers.3")
        finish_copies(accelerator)
        loss.backward()
    names = {event.name for event in found.events() if event.name.startswith("ebb::")}
    assert names == {"ebb::offload layers.3", "ebb::reload layers.3"}


def test_backward_on_another_stream(accelerator, x):
    for of_forward, of_backward in ((0, 1), (1, 0), (2, 3)):
        accelerator.use_stream(of_forward)
        y = forward(x, 6)
        accelerator.advance(7)
        accelerator.use_stream(of_backward)
        assert_exact(y, x, 6)
    accelerator.use_stream(0)


def test_value_fetched_ahead_is_used_on_another_stream(accelerator, x):
    with ebb.region(OFFLOAD_ALL):
        y = chain_of_sines(x, 6)
    finish_copies(accelerator)
    sent = accelerator.counts()["copies_out"]
    assert y.grad_fn._saved_self is not None  # fetches the others ahead
    accelerator.use_stream(1)
    assert_exact(y.sum(), x, 6)
    accelerator.use_stream(0)
    accelerator.advance(1000)

    assert accelerator.counts()["copies_in"] == sent


WRITES = {
    "in place": lambda h: h.mul_(2),
    "zeroed": lambda h: h.zero_(),
    "a part": lambda h: h[:2].add_(1),
    "copied into": lambda h: h.copy_(torch.ones_like(h)),
}


@pytest.mark.parametrize("keep", [0, 3])
@pytest.mark.parametrize("advance", [0, 1000])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_write_to_a_saved_tensor_raises_as_in_eager(write, inside, advance, keep, x):
    with fake_accelerator(keep_last=keep) as fake:
        with ebb.region(SINES):
            h, y = sine_and_cosine(x)
            fake.advance(advance)
            if inside:
                write(h)
        if not inside:
            with torch.no_grad():
                write(h)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("keep", [0, 3])
@pytest.mark.parametrize("advance", [0, 1000])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_recomputation_reads_the_state_before_a_write(write, advance, keep):
    """The write must wait for the copy; what reads the old state is recomputed from it."""

    def program(x):
        return overwritten(x, write).sin()

    x = leaves((4,))[0]
    expected = run(program, [x], None)
    with fake_accelerator(keep_last=keep) as fake:
        found = run(program, [x], SINES, lambda *_: fake.advance(advance))
        assert all(map(same_bits, found, expected))


def test_old_state_is_sent_once_before_a_write():
    """It was among the last ones until then."""

    def program(x):
        return overwritten(x).sin().sin()

    x = leaves((4,))[0]
    expected = run(program, [x], None)
    with fake_accelerator(keep_last=1) as fake:
        found = run(program, [x], SINES, lambda *_: finish_copies(fake))
        assert all(map(same_bits, found, expected))
        assert fake.counts()["copies_out"] == 1


def test_set_on_an_alias_is_no_write(accelerator, x):
    """Found by random programs: `set_` moves the version of the alias, and no other."""
    with ebb.region(SINES):
        h = x.sin()
        alias = h.data
        y = h * alias.cos()
        alias.set_(torch.zeros(4))
        z = y.exp()
    del h, alias
    finish_copies(accelerator)
    found = gradients(z.sum(), x)[0]

    h = x.sin()
    assert torch.equal(found, gradients((h * h.data.cos()).exp().sum(), x)[0])


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("advance", [0, 1000])
def test_write_to_an_input_after_the_region_raises(advance, dies, x):
    h = x * 2
    with fake_accelerator() as fake:
        with ebb.region(ebb.policies.offload_inputs):
            y = (h * 3).sin()
        fake.advance(advance)
        with torch.no_grad():
            h.zero_()
        if dies:
            del h
            finish_copies(fake)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("is_noticed", [False, True])
def test_storage_freed_while_it_is_copied_raises(is_noticed, accelerator, x):
    """Also if ebb has freed the device's memory after the copy."""
    with ebb.region(SINES):
        h, y = sine_and_cosine(x)
    h.untyped_storage().resize_(0)
    finish_copies(accelerator) if is_noticed else accelerator.advance(1000)
    del h

    with pytest.raises(RuntimeError, match="freed or resized while it was being copied"):
        y.sum().backward()
    assert accelerator.take_violations() == ["copy 1 reads from memory that was freed"]


def test_freed_storage_is_not_fetched_ahead(accelerator, x):
    with ebb.region(SINES):
        h, y = sine_and_cosine(x)
        z = (x * 2).sin().cos()
    h.untyped_storage().resize_(0)
    finish_copies(accelerator)
    accelerator.take_violations()
    assert z.grad_fn._saved_self is not None
    accelerator.advance(1000)

    assert accelerator.counts()["copies_in"] == 1
    del y


@pytest.mark.parametrize("regrows", [False, True])
@pytest.mark.parametrize("keep", [0, 1])
def test_storage_resized_before_the_copy_raises(keep, regrows, x):
    with fake_accelerator(keep_last=keep) as fake:
        with ebb.region(SINES):
            h, y = sine_and_cosine(x)
        storage = h.untyped_storage()
        storage.resize_(0)
        if regrows:
            storage.resize_(1 << 20)
        del h, storage
        with pytest.raises(RuntimeError, match="freed or resized while it was being copied"):
            y.sum().backward()
        fake.advance(1000)
        fake.take_violations()
