"""Programs that were once wrong, and close relatives; each is compared with eager bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ebb
from ebb_tests.exactness import (
    assert_exact,
    assert_like_eager,
    exact,
    leaves,
    like_eager,
    like_eager_each,
)
from ebb_tests.programs.custom_functions import Scratch, SilentScratch

pytestmark = pytest.mark.engines("exactness", "device", "checked")
NOT_FUSED = pytest.mark.on_cpu("fused cells have kernels for the CPU and CUDA only")


def test_parameters_in_one_flat_buffer():
    def two_parameters():
        flat = torch.linspace(0, 1, 8, dtype=torch.float64)
        a, b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        with torch.no_grad():
            a.normal_()
            b.normal_()
        a.data, b.data = flat[:4], flat[4:]
        return a, b

    def program(x, a, b):
        return ((x * a).sin() * b).sin() * a

    assert_exact(lambda x: program(x, *two_parameters()), leaves((4,)))
    made_outside = two_parameters()
    assert_exact(lambda x: program(x, *made_outside), leaves((4,)))


@like_eager()
def test_weights_tied_through_data(region):
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with torch.no_grad():
        first.weight.mul_(2)
        second.weight.mul_(3)
    second.weight.data = first.weight.data
    x = torch.randn(2, 4)
    with region:
        loss = second(first(x).tanh()).exp().sum()
    return torch.autograd.grad(loss, (first.weight, second.weight))


@pytest.mark.parametrize(
    "kind", [pytest.param(nn.LSTM, marks=NOT_FUSED), pytest.param(nn.GRU, marks=NOT_FUSED), nn.RNN]
)
@pytest.mark.parametrize("frozen", [False, True])
def test_recurrent_networks_that_choose_kernels_by_grad_mode(kind, frozen):
    net = kind(4, 4)
    net.requires_grad_(not frozen)
    x, w = leaves((5, 2, 4), (5, 2, 4), dtype=torch.float32)

    def program(x, w):
        h, _ = net(x)
        return (h.sin() * w).exp()

    assert_exact(program, (x, w))


def test_attention_that_asks_whether_its_arguments_are_one_tensor():
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    s = torch.randn(2, 5, 8)

    def program(w):
        with torch.no_grad():
            z, _ = attention(s, s, s)
        return w * z

    assert_exact(program, leaves((2, 5, 8), dtype=torch.float32))


@pytest.mark.parametrize(("silent", "alive"), [(False, False), (True, False), (True, True)])
@like_eager_each
def test_backward_that_overwrites_what_it_unpacked(region, silent, alive):
    x = leaves((4,))[0]
    with region:
        h = x * 2
        v = h + 1
        z = v * v
        u = (SilentScratch if silent else Scratch).apply(h)
        del v
        if not alive:
            del h
    (z + u).sum().backward()
    return x.grad


@pytest.mark.not_in_verify_mode(
    "it reports a write without a version change: gradients depend on lifetimes"
)
@pytest.mark.parametrize("alive", [False, True])
@like_eager_each
def test_backward_that_overwrites_what_several_unpack(region, alive):
    x = leaves((4,))[0]
    with region:
        h = x * 2
        last = h * x  # unpacks h last, so eager sees what Scratch left
        v = h + 1  # a recipe reads h
        z = v * v
        u = SilentScratch.apply(h)
        first = h * u
        del v
        if not alive:
            del h
    total = (first + z + last).sum()
    once = torch.autograd.grad(total, x, retain_graph=True)[0]
    return once, torch.autograd.grad(total, x)[0], h.detach() if alive else None


@pytest.mark.parametrize("scratch", [Scratch, SilentScratch])
@pytest.mark.parametrize(
    "policy", [ebb.Policy({"aten::clone": ebb.SAVE}), ebb.policies.save_all], ids=["clones", "all"]
)
def test_backward_that_overwrites_what_the_policy_keeps(policy, scratch):
    """Only autograd holds it."""

    def program(region):
        x = leaves((64,))[0]
        with region:
            kept = x.exp().clone()  # saved by sin, and by the function whose backward runs first
            loss = scratch.apply(kept).sum() + kept.sin().sum()
            del kept
        try:
            return torch.autograd.grad(loss, x)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017
            return None

    assert_like_eager(program, policy)


@pytest.mark.parametrize("kept", ["float16", "float64"])
@like_eager(ebb.policies.recompute_all)
def test_default_dtype_changed_between_forward_and_backward(region, kept):
    x = torch.ones(6, dtype=torch.float64, requires_grad=True)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        with region:
            loss = (torch.arange(6) * 1.37 * x).exp().sum()
        torch.set_default_dtype(getattr(torch, kept))
        return torch.autograd.grad(loss, x)[0]
    finally:
        torch.set_default_dtype(before)


@pytest.mark.not_in_verify_mode("the test device reads a setting of the CPU late", on_device=True)
@like_eager(ebb.policies.recompute_all)
def test_onednn_switched_off_between_forward_and_backward(region):
    conv = nn.Conv2d(3, 8, 3)
    x = torch.randn(2, 3, 16, 16)
    with region:
        loss = conv(x).exp().sin().sum()
    with torch.backends.mkldnn.flags(enabled=False):
        return torch.autograd.grad(loss, conv.weight)[0]


@like_eager(ebb.policies.recompute_all)
def test_threads_changed_inside_the_region(region):
    x = torch.randn(300_000, requires_grad=True)
    with region:
        torch.set_num_threads(2)
        total = x.sum()
        torch.set_num_threads(1)
        loss = ((x * total) / 1e3).exp().sum() * (total * 1e-3).exp()
    return torch.autograd.grad(loss, x)[0]


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="cannot flush denormals")
@like_eager(ebb.policies.recompute_all)
def test_flushing_of_denormals_changed_between_forward_and_backward(region):
    x = torch.full((4,), 1e-40, requires_grad=True)
    with region:
        loss = ((x * 0.01) * x.detach().add(1)).mul(x * 1e20).sum()
    torch.set_flush_denormal(True)
    try:
        return torch.autograd.grad(loss, x)[0]
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.replays
def test_float32_precision_changed_between_forward_and_backward_is_refused():
    w = torch.randn(8, 8, requires_grad=True)
    before = torch.get_float32_matmul_precision()
    with ebb.region(name="block"):
        loss = (w @ w).exp().sin().sum()
    try:
        torch.set_float32_matmul_precision("medium" if before != "medium" else "highest")
        with pytest.raises(RuntimeError, match=r"aten::mm.default in region 'block'.*precision"):
            loss.backward()
    finally:
        torch.set_float32_matmul_precision(before)


@exact((4,))
def test_more_dimensions_than_a_byte_counts(x):
    h = x.sin().reshape([1] * 299 + [4])
    return (h * h).reshape(4)


@like_eager(ebb.Policy({"aten::mul": ebb.SAVE}))
def test_saved_value_written_after_the_region_when_its_handle_is_gone(region):
    x = leaves((4,))[0]
    with region:
        h = x * 2
        t = h.sin()
        del t
        v = h + 1
        z = v * v
        del v
    with torch.no_grad():
        h.add_(1)
    z.sum().backward()
    return x.grad


def test_autocast_reaches_the_kernels_that_it_reached_in_forward():
    net = nn.Sequential(
        nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Softmax(-1)
    )

    def program(x):
        with torch.autocast("cpu", torch.bfloat16):
            h = net(x)
            with torch.autocast("cpu", enabled=False):
                h = h.float() @ h.float().t()
            return net(torch.nn.functional.pad(h, (0, 8 - h.shape[1]))).float().exp()

    assert_exact(program, leaves((4, 8), dtype=torch.float32))


@like_eager(ebb.policies.recompute_all)
def test_backward_under_another_autocast(region):
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    with region:
        loss = net(x).exp().sum()
    with torch.autocast("cpu", torch.bfloat16):
        return torch.autograd.grad(loss, list(net.parameters()))


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
@like_eager_each
def test_state_that_each_forward_updates_with_two_forwards_alive(region, norm):
    module = norm(nn.Linear(4, 4))
    a = module(torch.linspace(0, 1, 8).reshape(2, 4))
    with region:
        first = module(torch.ones(2, 4)).square().sum()
    with region:
        second = module(torch.linspace(-1, 1, 8).reshape(2, 4)).square().sum()
    (first + second + a.sum()).backward()
    return [p.grad for p in module.parameters()], list(module.buffers())


def fused_step(w):
    w.grad = torch.ones_like(w)
    torch.optim.AdamW([w], lr=0.5, fused=True).step()


@pytest.mark.replays
@pytest.mark.on_cpu("leaves have fingerprints there only")
@pytest.mark.parametrize(
    "write",
    [lambda w: w.data.mul_(0.5), lambda w: w.detach().numpy().__imul__(0.5), fused_step],
    ids=["data", "numpy", "fused optimizer"],
)
@pytest.mark.parametrize("width", [4, 64])
def test_leaf_written_without_moving_its_version_is_refused(write, width):
    w = torch.randn(width, width, requires_grad=True)
    x = torch.randn(width, width, requires_grad=True)
    with ebb.region(name="block"):
        loss = (x * torch.tanh(w @ x.detach()).detach()).exp().sum()
    version = w._version
    write(w)

    assert w._version == version
    message = r"aten::mm.default in region 'block'.*has changed since"
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


@pytest.mark.replays
@pytest.mark.on_cpu("leaves have fingerprints there only")
def test_batch_norm_in_evaluation_then_in_training_before_backward_is_refused():
    norm, w = nn.BatchNorm1d(4).eval(), torch.randn(4, 4, requires_grad=True)
    x = torch.randn(8, 4)
    with ebb.region(name="block"):
        loss = torch.sigmoid(norm(x) @ w).sum()
    norm.train()(x * 3 + 5)

    with pytest.raises(RuntimeError, match=r"native_batch_norm.*region 'block'.*has changed since"):
        loss.backward()
