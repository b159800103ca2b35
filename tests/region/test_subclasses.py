"""Wrapper subclasses: taken apart where their insides can be recomputed, else kept whole."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

import ebb
from ebb_tests.exactness import (
    assert_like_eager,
    each_policy,
    like_eager,
    like_eager_each,
    policies,
    replayed,
    same_bits,
)

pytestmark = pytest.mark.engines("exactness", "device")


class Pair(torch.Tensor):
    """Two tensors that go through every op side by side; `tag` travels in the context."""

    flattens = True

    @staticmethod
    def __new__(cls, first, second, tag="pair"):
        pair = torch.Tensor._make_wrapper_subclass(
            cls, first.size(), first.stride(), dtype=first.dtype, device=first.device
        )
        pair.first, pair.second, pair.tag = first, second, tag
        return pair

    def __tensor_flatten__(self):
        if not type(self).flattens:
            raise NotImplementedError
        return ["first", "second"], self.tag

    @staticmethod
    def __tensor_unflatten__(inner, tag, size, stride):
        return Pair(inner["first"], inner["second"], tag)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def half(name):
            return tree_map(
                lambda x: getattr(x, name) if isinstance(x, Pair) else x, (args, kwargs)
            )

        (first_args, first_kwargs), (second_args, second_kwargs) = half("first"), half("second")
        first = func(*first_args, **(first_kwargs or {}))
        second = func(*second_args, **(second_kwargs or {}))
        tag = next(a.tag for a in args if isinstance(a, Pair))
        if func._schema.is_mutable:
            return args[0]
        if isinstance(first, torch.Tensor):
            return Pair(first, second, tag)
        return first


def pair(seed):
    generator = torch.Generator().manual_seed(seed)
    return Pair(*(torch.randn(4, 4, generator=generator) for _ in range(2)), tag=f"from {seed}")


def gradients(program, region):
    x, w = pair(1).requires_grad_(), pair(2).requires_grad_()
    with region:
        out = program(x, w)
    return [t for g in torch.autograd.grad(out.sum(), (x, w)) for t in (g.first, g.second)]


def chain(x, w):
    h = (x @ w).sin()
    return torch.nn.functional.gelu(h * h).t() @ x.exp()


@pytest.mark.on_cpu("its numbers are drawn from a generator of the CPU")
@like_eager_each
def test_gradients_of_a_wrapper_are_those_of_eager(region):
    return gradients(chain, region)


@pytest.mark.on_cpu("its numbers are drawn from a generator of the CPU")
@pytest.mark.replays
def test_inner_tensors_are_freed_and_recomputed():
    alive = WeakTensorKeyDictionary()

    def program(x, w):
        h = (x @ w).sin()
        alive[h.first] = alive[h.second] = True
        return (h * h).exp()

    x, w = pair(1).requires_grad_(), pair(2).requires_grad_()
    with ebb.region():
        out = program(x, w)
    gc.collect()

    assert len(alive) == 0
    out.sum().backward()
    assert replayed() > 0


@pytest.mark.on_cpu("its numbers are drawn from a generator of the CPU")
def test_context_and_class_survive():
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a.clone()

        @staticmethod
        def backward(ctx, grad):
            (a,) = ctx.saved_tensors
            seen.append((type(a), a.tag, a.shape))
            return grad

    x = pair(3).requires_grad_()
    with ebb.region():
        out = Look.apply(x.sin())
    out.sum().backward()

    assert seen == [(Pair, "from 3", (4, 4))]


@pytest.mark.on_cpu("its numbers are drawn from a generator of the CPU")
def test_wrapper_without_a_working_protocol_is_kept_whole(monkeypatch):
    expected = gradients(chain, torch.enable_grad())
    monkeypatch.setattr(Pair, "flattens", False)

    actual = gradients(chain, ebb.region())

    assert all(same_bits(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.on_cpu("its numbers are drawn from a generator of the CPU")
def test_saved_wrapper_written_in_place_raises_as_in_eager():
    for region in (torch.enable_grad(), ebb.region()):
        x = pair(1).requires_grad_()
        with region:
            h = x.sin()
            out = h.exp()
            out.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.on_cpu("its numbers are drawn from a generator of the CPU")
@pytest.mark.replays
def test_inner_tensor_that_is_a_wrapper_too():
    def nested(region):
        x = Pair(pair(1), pair(2)).requires_grad_()
        with region:
            out = ((x * x).sin() * x).exp()
        (g,) = torch.autograd.grad(out.sum(), x)
        return [half for part in (g.first, g.second) for half in (part.first, part.second)]

    assert_like_eager(nested, ebb.policies.recompute_all)
    assert replayed() > 0


@pytest.mark.on_cpu("its numbers are drawn from a generator of the CPU")
@like_eager(ebb.policies.recompute_all)
def test_quantised_tensors_are_kept_whole(region):
    w = torch.randn(4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with region:
        q = torch.quantize_per_tensor(w.detach() * 2, 0.1, 0, torch.qint8)
        out = (w * 2).sin() * q.dequantize()
    return torch.autograd.grad(out.sum(), w)[0]


@like_eager(ebb.policies.recompute_all)
def test_ragged_tensors_are_kept_whole(region):
    parts = [torch.linspace(0, 1, n * 3).reshape(n, 3).requires_grad_() for n in (2, 4)]
    with region:
        ragged = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        out = (ragged.sin() * ragged).exp().values().sum()
    return torch.autograd.grad(out, parts)


@pytest.fixture(scope="module")
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.on_cpu("its numbers are drawn from a generator of the CPU")
@pytest.mark.replays
@each_policy
def test_distributed_tensors(mesh, policy):
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    def program(region):
        generator = torch.Generator().manual_seed(5)
        x, w1, w2 = (torch.randn(4, 4, generator=generator) for _ in range(3))
        x = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
        w1 = distribute_tensor(w1, mesh, [Shard(1)]).requires_grad_()
        w2 = distribute_tensor(w2, mesh, [Shard(0)]).requires_grad_()
        with region:
            h = torch.nn.functional.gelu(x @ w1)
            h = torch.nn.functional.dropout(h, 0.5) @ w2
            assert isinstance(h.placements[0], Partial)
            out = (h.redistribute(mesh, [Replicate()]) * x).exp().sum()
        grads = torch.autograd.grad(out, (x, w1, w2))
        return [g.full_tensor() for g in grads]

    assert_like_eager(program, policy)
    keep_all = [policies().get(f"{keep}_all") for keep in ("save", "offload", "page")]
    assert (replayed() > 0) == (policy not in keep_all)


def test_distributed_activations_are_freed(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    alive = WeakTensorKeyDictionary()
    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]).requires_grad_()
    with ebb.region():
        h = x.sin()
        alive[h._local_tensor] = True
        out = (h * h).exp().sum()
        del h

    assert len(alive) == 0
    out.backward()


@torch.no_grad()
def write_to_first(x):
    x.first.mul_(3)


@pytest.mark.on_cpu("its numbers are drawn from a generator of the CPU")
@pytest.mark.parametrize("inside", [True, False])
@like_eager_each
def test_a_write_to_the_inner_tensor_is_seen_by_backward_as_in_eager(region, inside):
    x = pair(1).requires_grad_()
    with region:
        h = x * 2
        out = (h * h).sin()
        if inside:
            write_to_first(h)
    if not inside:
        write_to_first(h)
    (g,) = torch.autograd.grad(out.sum(), x)
    return g.first, g.second


@pytest.mark.on_cpu("its numbers are drawn from a generator of the CPU")
def test_an_inner_tensor_written_after_the_region_and_freed_is_refused():
    x = pair(1).requires_grad_()
    with ebb.region(name="block"):
        h = x * 2
        out = (h * h).sin()
    write_to_first(h)
    del h
    with pytest.raises(RuntimeError, match=r"in region 'block' was freed after a write through"):
        out.sum().backward()
