"""discard frees a tensor after its region; backward restores it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu

import ebb
from ebb_tests.memory_use import allocations, peak_bytes


@pytest.fixture
def x():
    return torch.randn(4, 3, requires_grad=True)


def made(x):
    with ebb.region(name="made"):
        return ebb.experimental.discardable(gelu(x * 2))


def bytes_of(tensor):
    return tensor.untyped_storage().nbytes()


def test_three_lines(x):
    w = torch.randn(3, 3, requires_grad=True)
    expected = torch.autograd.grad((gelu(x * 2) @ w).sin().sum(), (x, w))
    y = made(x)
    z = y @ w
    ebb.experimental.discard(y, restore_at=z)
    assert bytes_of(y) == 0
    found = torch.autograd.grad(z.sin().sum(), (x, w))

    assert all(map(torch.equal, found, expected))
    assert torch.equal(y, gelu(x * 2))


def test_views_that_were_made_before_show_the_data_again(x):
    w = torch.randn(4, 4, requires_grad=True)
    expected = torch.autograd.grad((w @ gelu(x * 2))[1:].sum(), (x, w))
    y = made(x)
    row, turned = y[1], y.t()
    z = (turned @ w.t()).t()[1:]
    ebb.experimental.discard(y, restore_at=z)
    found = torch.autograd.grad(z.sum(), (x, w))

    assert all(map(torch.equal, found, expected))
    assert torch.equal(row, gelu(x * 2)[1])


@pytest.mark.parametrize("read", [torch.sin, torch.clone, torch.Tensor.tolist, lambda t: t.add_(1)])
def test_reading_it_meanwhile_names_op_region_shape_and_remedy(read, x):
    y = made(x)
    z = y.sin()
    view = y[1:]
    ebb.experimental.discard(y, restore_at=z)

    assert isinstance(y, torch.Tensor)
    assert y.shape == (4, 3)
    for tensor in (y, view):  # torch itself raises for other tensors on the same memory
        with pytest.raises(
            ebb.experimental.PlaceholderError if tensor is y else RuntimeError,
            match=r"the output of aten::gelu.default saved in region 'made' "
            r"\(torch.FloatTensor \[4, 3\]\) was read after discard\(\) freed it.*restore_at",
        ):
            read(tensor)
    z.sum().backward()
    assert type(y) is torch.Tensor


def test_a_reader_that_backward_reaches_first_raises(x):
    y = made(x)
    z = y.sin()
    other = y.cos()
    ebb.experimental.discard(y, restore_at=z)
    with pytest.raises(RuntimeError, match=r"was read after discard\(\) freed it"):
        torch.autograd.grad(other.sum(), x)


def test_the_graph_may_be_used_twice(x):
    y = made(x)
    z = y.sin()
    ebb.experimental.discard(y, restore_at=z)
    first = torch.autograd.grad(z.sum(), x, retain_graph=True)
    second = torch.autograd.grad(z.sum(), x)

    assert torch.equal(*first, *second)


def test_checkpoint_with_discard_output(x):
    layer = nn.Linear(3, 5)
    expected = torch.autograd.grad(layer(gelu(x * 2)).sin().sum(), (x, layer.weight))
    y, rest = ebb.checkpoint(lambda x: (gelu(x * 2), 3), x, discard_output=True)
    assert rest == 3
    z = layer(y)
    ebb.experimental.discard(y, restore_at=z)
    found = torch.autograd.grad(z.sin().sum(), (x, layer.weight))

    assert all(map(torch.equal, found, expected))


def test_random_ops_repeat():
    x = torch.randn(64, requires_grad=True)

    def program(discards):
        torch.manual_seed(3)
        with ebb.region():
            y = ebb.experimental.discardable(torch.dropout(x * 2, 0.5, True))
        z = y.sin()
        if discards:
            ebb.experimental.discard(y, restore_at=z)
        torch.rand(5)
        return torch.autograd.grad(z.sum(), x)[0]

    assert torch.equal(program(True), program(False))


def test_what_comes_back_exists_once():
    """Four outputs of a region, saved outside: discarded, all but the one that is needed are gone,
    and nothing is copied."""
    size = 1 << 20
    x = torch.randn(size // 4, requires_grad=True)

    def peak(discards):
        def step():
            h = x
            for _ in range(4):
                with ebb.region():
                    y = ebb.experimental.discardable(h.sin())
                h = y.cos()
                if discards:
                    ebb.experimental.discard(y, restore_at=h)
                del y
            loss = h.sum()
            del h
            loss.backward()

        step()
        return peak_bytes(step)

    assert peak(True) == peak(False) - 3 * size


def test_what_backward_never_reaches_costs_nothing(no_objects_left):
    x = torch.randn(1 << 16, requires_grad=True)

    def forward():
        y = made(x)
        z = y.sin()
        ebb.experimental.discard(y, restore_at=z)

    forward()
    assert sum(allocations(forward)) == 0


def test_training_goes_on_as_without():
    def losses(discards):
        torch.manual_seed(0)
        up, down = nn.Linear(8, 32), nn.Linear(32, 8)
        parameters = [*up.parameters(), *down.parameters()]
        optimizer = torch.optim.Adam(parameters, 1e-2)
        x = torch.randn(16, 8)
        found = []
        for _ in range(10):
            h = up(x)
            if discards:
                y = ebb.checkpoint(gelu, h, discard_output=True)
                z = down(y)
                ebb.experimental.discard(y, restore_at=z)
            else:
                z = down(gelu(h))
            loss = z.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return [*found, *(p.detach().clone() for p in parameters)]

    assert all(torch.equal(a, b) for a, b in zip(losses(True), losses(False), strict=True))


# Bad input


@pytest.mark.parametrize("policy", [ebb.policies.save_all, ebb.Policy(default=ebb.SAVE)])
def test_what_is_saved_or_an_input_cannot_be_discarded(policy, x):
    with ebb.region(policy):
        y = x.sin()
        for tensor in (x, y):
            with pytest.raises(ValueError, match=r"cannot be discarded.*decision RECOMPUTE"):
                ebb.experimental.discardable(tensor)


def test_what_is_not_marked(x):
    with ebb.region():
        y = x.sin()
    with pytest.raises(ValueError, match="discardable\\(\\) marked"):
        ebb.experimental.discard(y, restore_at=y.cos())
    with pytest.raises(TypeError, match="restore_at must be a tensor"):
        ebb.experimental.discard(y, restore_at=None)

    marked = made(x)
    z = marked.sin()
    ebb.experimental.discard(marked, restore_at=z)
    with pytest.raises(ValueError, match="discardable\\(\\) marked"):
        ebb.experimental.discard(marked, restore_at=z)  # its mark is gone
    z.sum().backward()


def test_what_needs_no_grad_restores_nothing(x):
    y = made(x)
    with pytest.raises(ValueError, match="restore_at must require grad"):
        ebb.experimental.discard(y, restore_at=torch.zeros(3))
    assert bytes_of(y) == 48


@pytest.mark.parametrize("write", [lambda y: y.mul_(2), lambda y: y[1:].zero_()])
def test_what_was_written_since_it_was_marked(write, x):
    y = made(x)
    write(y)
    z = y.sin()
    with pytest.raises(ValueError, match=r"was written after discardable\(\) marked it"):
        ebb.experimental.discard(y, restore_at=z)
    assert bytes_of(y) == 48
    z.sum().backward()


def test_an_offloaded_tensor_cannot_be_discarded(accelerator, x):
    with (
        ebb.region(ebb.Policy(default=ebb.OFFLOAD)),
        pytest.raises(ValueError, match="SAVE or OFFLOAD"),
    ):
        ebb.experimental.discardable(x.sin())
