"""The same programs on every device there is: on the CPU always, on CUDA where there is one."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ebb
from ebb_tests.exactness import POLICIES, assert_like_eager
from ebb_tests.gpus import DRAWS_NUMBERS, USES_CUDNN

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.needs_cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]

POLICIES = POLICIES | {
    "offload_all": ebb.Policy(default=ebb.OFFLOAD, inputs=ebb.OFFLOAD),
    "offload_inputs": ebb.policies.offload_inputs,
}


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        ebb.config.update(offload_min_bytes=0)  # on the CPU nothing is sent anyway
    yield torch.device(request.param)
    torch.use_deterministic_algorithms(False)


def transformer(x, w):
    h = F.layer_norm(x, x.shape[-1:])
    q, k, v = (h @ w).view(2, 8, 3, 2, 16).permute(2, 0, 3, 1, 4)
    a = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
    h = F.dropout(a.transpose(1, 2).reshape(2, 8, 32), 0.3) + torch.rand_like(x)
    return F.gelu(h + x).exp()


def in_place(x, w):
    h = (x @ w[:, :32]).add_(1)
    h[:, 1:].add_(h[:, :1].detach())
    noise = torch.empty_like(h).normal_()
    return (h * noise).sin()


def under_autocast(x, w):
    with torch.autocast(x.device.type, torch.bfloat16):
        h = F.silu(x @ w[:, :32]) * (x @ w[:, 32:64])
        return F.softmax(h, -1).float().exp()


def through_the_host(x, w):
    h = x * 2
    on_host = h.detach().to("cpu") + 1
    return (h * on_host.to(x.device)).exp()


def explicit_generator(x, w):
    generator = torch.Generator(device=x.device).manual_seed(3)
    mask = torch.empty_like(x).bernoulli_(0.5, generator=generator)
    return (x * mask).exp() + torch.rand(1, generator=generator, device=x.device)


PROGRAMS = [
    *(
        pytest.param(one, marks=DRAWS_NUMBERS)
        for one in (transformer, in_place, explicit_generator)
    ),
    under_autocast,
    through_the_host,
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_gradients_and_random_state(program, policy, device):
    def run(region):
        torch.manual_seed(1)
        x = torch.randn(2, 8, 32, device=device, requires_grad=True)
        w = torch.randn(32, 96, device=device, requires_grad=True)
        with region:
            loss = program(x, w).sum()
        grads = torch.autograd.grad(loss, (x, w), allow_unused=True)
        return [loss.detach(), *(g for g in grads if g is not None), torch.rand(3, device=device)]

    assert_like_eager(run, POLICIES[policy])


@USES_CUDNN
@pytest.mark.parametrize("policy", POLICIES)
def test_convolutions_and_batch_norm(policy, device):
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3)
    ).to(device)
    ours = copy.deepcopy(plain)
    ebb.apply(ours, POLICIES[policy], modules="")
    x = torch.randn(2, 3, 9, 9, device=device)
    for net in (plain, ours):
        net(x).square().sum().backward()

    gradients = ([p.grad for p in net.parameters()] for net in (ours, plain))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    buffers = zip(ours.buffers(), plain.buffers(), strict=True)
    assert all(torch.equal(a, b) for a, b in buffers)


@pytest.mark.needs_cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("policy", ["offload_all", "offload_inputs"])
def test_offload_frees_device_memory(policy):
    """Of what eager holds between forward and backward most is gone, and all of it comes back."""
    width = 1024
    layers = [nn.Linear(width, width, bias=False, device="cuda") for _ in range(8)]
    x = torch.randn(4096, width, device="cuda", requires_grad=True)

    def step(region):
        h = x
        for layer in layers:
            with region():
                h = F.gelu(layer(h)) + h
        loss = h.square().mean()
        del h
        torch.cuda.synchronize()
        ebb.stats()["offload"]  # looks for copies that are done
        held = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(loss, [x, *(layer.weight for layer in layers)])
        return held, grads

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    step(torch.enable_grad)
    torch.cuda.synchronize()
    until = time.monotonic() + 5  # autograd's thread may still hold the last gradient
    while torch.cuda.memory_allocated() != before and time.monotonic() < until:
        time.sleep(0.01)
    start = torch.cuda.memory_allocated()
    eager, expected = step(torch.enable_grad)
    kept = [g.cpu() for g in expected]
    del expected
    ours, found = step(lambda: ebb.region(POLICIES[policy]))

    assert start == before
    assert ours - start < 0.2 * (eager - start)
    assert all(torch.equal(a.cpu(), e) for a, e in zip(found, kept, strict=True))
