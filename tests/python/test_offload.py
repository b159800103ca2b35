"""OFFLOAD on a fake accelerator: which copies run, in which order, and that gradients are exact."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from exactness import leaves, run, same_bits
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import gelu

import ebb
from ebb._testing import fake_accelerator

OFFLOAD_ALL = ebb.Policy(default=ebb.OFFLOAD, inputs=ebb.OFFLOAD)
SINES = ebb.Policy({"aten::sin": ebb.OFFLOAD})

pytestmark = pytest.mark.skipif(
    "EBB_TEST_OFFLOAD" in os.environ, reason="has accelerators of its own"
)


@pytest.fixture
def accelerator():
    with fake_accelerator() as fake:
        yield fake


def chain_of_sines(x, length=3):
    """Each function's input is saved; each but the first is a result that nothing else holds."""
    for _ in range(length):
        x = x.sin().cos()
    return x


def finish_copies(fake):
    """All queued copies run, and the engine notices, as it does at each pack and unpack."""
    fake.advance(1 << 30)
    ebb.offload.stats()


def gradients(loss, inputs):
    return torch.autograd.grad(loss, inputs)


# Exactness


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(gelu(self.up(self.norm(x))))


POLICIES = {
    "all": OFFLOAD_ALL,
    "inputs": ebb.policies.offload_inputs,
    "products": ebb.Policy({"aten::*mm": ebb.OFFLOAD, "aten::gelu": ebb.SAVE}),
    "mixed": ebb.Policy(
        {"aten::*mm": ebb.OFFLOAD, "aten::native_layer_norm": ebb.SAVE}, inputs=ebb.OFFLOAD
    ),
}


@pytest.mark.parametrize("in_flight", [0, 1 << 12, 1 << 40])
@pytest.mark.parametrize("prefetch", [0, 1 << 13, 1 << 40])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_transformer_has_the_bits_of_eager(policy, prefetch, in_flight):
    blocks = [Block(), Block(), Block()]
    x = torch.randn(2, 8, 16, requires_grad=True)
    parameters = [x, *(p for block in blocks for p in block.parameters())]

    def step(region):
        h = x
        for block in blocks:
            with region():
                h = block(h)
        return [h.detach(), *gradients(h.square().mean(), parameters)]

    expected = step(contextlib.nullcontext)
    with fake_accelerator(in_flight_bytes=in_flight, prefetch_bytes=prefetch) as fake:
        for advance in (0, 1, 1000):
            found = step(lambda: ebb.region(policy))
            assert all(map(same_bits, found, expected))
            fake.advance(advance)
        gc.collect()
        assert fake.counts()["copies_out"] > 0
        assert ebb.offload.stats()["stashes"] == 0
        assert ebb.offload.stats()["host_bytes_used"] == 0


def test_the_rules_hold_with_offload():
    """The tests of exactness again, with policies that offload: copies as late as can be, and as
    soon."""
    folder = Path(__file__).parent
    files = sorted(str(f) for f in folder.glob("test_rule*.py"))
    names = ("nasty_programs", "nasty_memory", "nasty_functions", "handles", "subclasses", "opaque")
    files += [str(folder / f"test_{name}.py") for name in names]
    for how in ("late", "prompt"):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
            env=os.environ | {"EBB_TEST_OFFLOAD": how},
            cwd=folder.parents[1],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-3000:]


def test_offloading_recomputes_nothing(accelerator):
    x, w = leaves((4, 4), (4, 4))
    with ebb.region(OFFLOAD_ALL):
        y = (x @ w).sin() @ w
    y.sum().backward()

    assert ebb.stats()["total"]["ops_replayed"] == 0


DTYPES = [
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.bool,
    torch.int64,
    torch.float8_e4m3fn,
]


class Keeps(torch.autograd.Function):
    """Saves a tensor of any kind and gives it back in backward."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(kept)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Keeps.seen = ctx.saved_tensors[0]
        return gradient, None


VIEWS = {
    "whole": lambda t: t,
    "transposed": lambda t: t.t(),
    "row": lambda t: t[1],
    "column": lambda t: t[:, 2],
    "strided": lambda t: t[::2, ::3],
    "expanded": lambda t: t[:1].expand(5, -1),
    "number": lambda t: t[1, 1],
    "empty": lambda t: t[:0],
    "shifted": lambda t: t[2:, 1:],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_every_dtype_and_geometry_comes_back(accelerator, dtype, view):
    x = torch.zeros(1, requires_grad=True)
    numbers = torch.randint(0, 2, (4, 6)) if dtype is torch.bool else torch.randn(4, 6) * 8
    with ebb.region(OFFLOAD_ALL):
        kept = view(numbers.to(dtype).clone())
        expected = kept.clone()
        strides, offset = kept.stride(), kept.storage_offset()
        y = Keeps.apply(x, kept)
    del kept
    accelerator.advance(1000)
    y.backward(torch.ones(1))

    assert same_bits(Keeps.seen, expected)
    assert (Keeps.seen.stride(), Keeps.seen.storage_offset()) == (strides, offset)


@pytest.mark.parametrize("how", ["late", "prompt"])
def test_random_programs_with_offload(how):
    script = Path(__file__).with_name("test_random_programs.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), "300"],
        env=os.environ | {"EBB_TEST_OFFLOAD": how},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["replayed"] > 60


def test_a_write_into_an_offloaded_value_leaves_one_to_offload(accelerator):
    x = torch.randn(4, requires_grad=True)
    with ebb.region(ebb.Policy({"aten::mul": ebb.OFFLOAD})):
        h = (x * 2).relu_()  # saves its result
        y = h.exp()
    del h
    finish_copies(accelerator)
    y.sum().backward()

    assert accelerator.counts()["copies_out"] == 1
    assert ebb.stats()["total"]["bytes_saved"] == 0
    assert torch.equal(x.grad, gradients((x * 2).relu().exp().sum(), x)[0])


# What is sent


@pytest.mark.parametrize(("elements", "sent"), [(127, 0), (128, 1), (129, 1)])
def test_the_least_size_is_in_bytes(elements, sent):
    x = torch.randn(elements, dtype=torch.float64, requires_grad=True)
    with fake_accelerator(min_bytes=1024) as fake:
        with ebb.region(SINES):
            y = x.sin().cos()
        y.sum().backward()
        fake.advance(1000)
        assert fake.counts()["copies_out"] == sent


def test_parameters_and_their_views_stay(accelerator):
    w = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(4, 4)
    with ebb.region(ebb.policies.offload_inputs):
        y = (x @ w.t()).sin() * w[:, :1]
    y.sum().backward()
    accelerator.advance(1000)

    assert accelerator.counts()["copies_out"] == 0


def test_inputs_are_what_other_functions_computed(accelerator):
    x = torch.randn(4, 4, requires_grad=True)
    h = x * 2
    with ebb.region(ebb.policies.offload_inputs):
        y = h.sin().cos().exp()
    del h
    accelerator.advance(1000)
    storages = ebb.offload.stats()
    y.sum().backward()

    assert storages["stashes"] == 1
    assert accelerator.counts()["copies_out"] == 1
    assert accelerator.counts()["copies_in"] == 1
    assert torch.equal(x.grad, gradients((x * 2).sin().cos().exp().sum(), x)[0])


@pytest.mark.parametrize("mark", ["_do_not_offload", "_TE_do_not_offload"])
def test_marked_tensors_stay(accelerator, mark):
    x = torch.randn(4, requires_grad=True)
    with ebb.region(OFFLOAD_ALL):
        h = x.sin()
        setattr(h, mark, True)
        y = h.cos()
    y.sum().backward()
    accelerator.advance(1000)

    assert accelerator.counts()["copies_out"] == 0


def test_one_copy_however_many_tensors_saved_it(accelerator):
    x = torch.randn(6, 4, requires_grad=True)
    with ebb.region(SINES):
        h = x.sin()
        a, b = h[:3], h[3:]
        y = h.cos().sum() + h.exp().sum() + a.cos().sum() + b.tanh().sum() + h.t().sin().sum()
    del h, a, b
    finish_copies(accelerator)
    y.backward()
    accelerator.advance(1000)

    assert accelerator.counts()["copies_out"] == 1
    assert accelerator.counts()["copies_in"] == 1


def test_memory_at_the_same_address_is_another_tensor(accelerator):
    x = torch.randn(1024, requires_grad=True)
    expected = gradients(sum((x * k).sin().cos().sum() for k in range(1, 9)), x)[0]
    with ebb.region(OFFLOAD_ALL):
        loss = 0
        for k in range(1, 9):
            loss = loss + (x * k).sin().cos().sum()
            accelerator.advance(1000)  # what was sent is freed: the next one may get its address
    assert torch.equal(gradients(loss, x)[0], expected)


def test_on_the_cpu_offload_means_save_and_says_so():
    program = (
        "import torch, ebb\n"
        "x = torch.randn(1 << 20, requires_grad=True)\n"
        "for _ in range(2):\n"
        "    with ebb.region(ebb.Policy(default=ebb.OFFLOAD)):\n"
        "        y = x.sin().cos().sum()\n"
        "    y.backward()\n"
        "print(torch.equal(x.grad, 2 * torch.autograd.grad(x.sin().cos().sum(), x)[0]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.stdout == "True\n"
    assert done.stderr.count("OFFLOAD means SAVE for a tensor on cpu") == 1


# Memory


def test_device_memory_lives_until_its_copy_is_done_and_no_longer(accelerator):
    x = torch.randn(4, requires_grad=True)
    with ebb.region(SINES):
        h = x.sin()
        watch = StorageWeakRef(h.untyped_storage())
        y = h.cos()
        del h
        assert not watch.expired()
        accelerator.advance(1)
    ebb.offload.stats()  # looks for copies that are done, as each pack and unpack does

    assert watch.expired()
    y.sum().backward()


def test_a_tensor_in_flight_is_served_from_the_device(accelerator):
    x = torch.randn(4, requires_grad=True)
    with ebb.region(SINES):
        y = x.sin().cos()
    y.sum().backward()
    accelerator.advance(1000)

    assert accelerator.counts()["copies_out"] == 1
    assert accelerator.counts()["copies_in"] == 0


@pytest.mark.parametrize("limit", [0, 100, 1000])
def test_no_more_than_the_limit_is_in_flight(limit):
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)  # 32 bytes
    with fake_accelerator(in_flight_bytes=limit) as fake:
        with ebb.region(OFFLOAD_ALL):
            y = x
            for _ in range(20):
                y = y.sin()
                now = ebb.offload.stats()["in_flight_bytes"]
                assert now <= limit
        y.sum().backward()
        assert fake.counts()["host_waits"] == (0 if limit == 1000 else 19 if limit == 0 else 16)


@pytest.mark.parametrize("keep", [0, 1, 2, 5])
def test_the_last_ones_stay_on_the_device(keep):
    x = torch.randn(4, requires_grad=True)
    with fake_accelerator(keep_last=keep) as fake:
        with ebb.region(OFFLOAD_ALL):
            y = x
            for _ in range(8):
                y = y.sin()
        finish_copies(fake)
        out = fake.counts()["copies_out"]
        y.sum().backward()
        assert out == 7 - keep
        assert fake.counts()["copies_in"] == out


def test_what_was_sent_before_is_fetched_ahead():
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    with fake_accelerator(prefetch_bytes=64) as fake:  # two tensors
        with ebb.region(OFFLOAD_ALL):
            y = x
            for _ in range(8):
                y = y.sin()
        finish_copies(fake)
        before = ebb.offload.stats()["fetched_late"]
        assert y.grad_fn._saved_self is not None
        assert fake.counts()["queued"] == 2
        y.sum().backward()
        assert ebb.offload.stats()["fetched_late"] - before == 1


def test_host_memory_is_used_again_and_has_the_exact_size():
    x = torch.randn(1000, requires_grad=True)
    with fake_accelerator() as fake:
        allocations = []
        for _ in range(5):
            with ebb.region(OFFLOAD_ALL):
                y = x.sin().cos()[:700].exp().sin()
            fake.advance(1000)
            y.sum().backward()
            fake.advance(1000)
            del y
            allocations.append(fake.counts()["host_allocations"])
        stats = ebb.offload.stats()
        assert allocations[1:] == allocations[1:2] * 4
        assert (
            stats["host_bytes_held"] == fake.counts()["host_bytes"] <= 1.05 * 4 * (2 * 1000 + 700)
        )
        assert stats["host_bytes_used"] == 0


def test_a_small_tensor_takes_no_large_buffer():
    x = torch.randn(1000, requires_grad=True)
    with fake_accelerator() as fake:
        for part in (x, x[:10]):
            with ebb.region(OFFLOAD_ALL):
                y = part.sin().cos()
            used = ebb.offload.stats()["host_bytes_used"]
            assert used == 4 * part.numel()
            y.sum().backward()
            del y
            finish_copies(fake)


@pytest.mark.parametrize("limit", [0, 100])
def test_without_host_memory_values_are_recomputed_or_kept(limit):
    x = torch.randn(16, requires_grad=True)
    h = x * 2
    expected = gradients((x * 2).sin().cos().exp().sum(), x)[0]
    with fake_accelerator(pinned_limit=limit) as fake:
        with ebb.region(OFFLOAD_ALL, "full"):
            y = h.sin().cos().exp()
        y.sum().backward()
        fake.advance(1000)
        counts = ebb.stats()["regions"]["full"]
        sent = limit // 64
        assert fake.counts()["copies_out"] == sent
        assert counts["bytes_offloaded"] == 64 * sent
        assert counts["bytes_fell_back"] == 64 * (4 - sent)
        assert counts["ops_replayed"] > 0
    assert torch.equal(x.grad, expected)


def test_a_host_that_has_no_memory_is_a_fallback():
    x = torch.randn(16, requires_grad=True)
    with fake_accelerator(100) as fake:
        with ebb.region(OFFLOAD_ALL):
            y = x.sin().cos().exp()
        y.sum().backward()
        fake.advance(1000)
        assert fake.counts()["copies_out"] == 1
    assert torch.equal(x.grad, gradients(x.sin().cos().exp().sum(), x)[0])


# Order


def test_backward_on_another_stream(accelerator):
    x = torch.randn(4, requires_grad=True)
    expected = gradients(chain_of_sines(x, 6).sum(), x)[0]
    for forward, backward in ((0, 1), (1, 0), (2, 3)):
        accelerator.use_stream(forward)
        with ebb.region(OFFLOAD_ALL):
            y = chain_of_sines(x, 6)
        accelerator.advance(7)
        accelerator.use_stream(backward)
        assert torch.equal(gradients(y.sum(), x)[0], expected)
    accelerator.use_stream(0)


def test_what_was_fetched_ahead_for_another_stream_is_moved(accelerator):
    """Its memory belongs to that stream, which may use it again while this one reads it."""
    x = torch.randn(4, requires_grad=True)
    expected = gradients(chain_of_sines(x, 6).sum(), x)[0]
    with ebb.region(OFFLOAD_ALL):
        y = chain_of_sines(x, 6)
    finish_copies(accelerator)
    sent = accelerator.counts()["copies_out"]
    assert y.grad_fn._saved_self is not None  # fetches the others ahead
    accelerator.use_stream(1)
    assert torch.equal(gradients(y.sum(), x)[0], expected)
    accelerator.use_stream(0)
    accelerator.advance(1000)

    assert accelerator.counts()["copies_in"] == sent + (sent - 1)


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
def test_a_saved_tensor_that_is_written_raises_as_in_eager(write, inside, advance, keep):
    x = torch.randn(4, requires_grad=True)
    with fake_accelerator(keep_last=keep) as fake:
        with ebb.region(SINES):
            h = x.sin()
            y = h.cos()  # saves h
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
def test_recipes_read_what_was_there_before_a_write(write, advance, keep):
    """The write must wait for the copy; what reads the old state is recomputed from it."""

    def program(x):
        h = x.sin()
        h.cos()  # saves h, which so is sent; nothing comes of it
        y = (h * 2).exp()  # saves its result; `h * 2` reads h
        with torch.no_grad():
            write(h)
        return y.sin()

    x = leaves((4,))[0]
    policy = ebb.Policy({"aten::sin": ebb.OFFLOAD})
    expected = run(program, [x], None)
    with fake_accelerator(keep_last=keep) as fake:
        found = run(program, [x], policy, lambda *_: fake.advance(advance))
        assert all(map(same_bits, found, expected))


def test_an_alias_that_is_given_another_storage_writes_nothing(accelerator):
    """Found by random programs: `set_` moves the version of the alias, and no other."""
    x = torch.randn(4, requires_grad=True)
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
def test_an_input_that_is_written_after_the_region_raises(advance, dies):
    x = torch.randn(4, requires_grad=True)
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


def test_storage_that_is_freed_while_it_is_copied(accelerator):
    x = torch.randn(4, requires_grad=True)
    with ebb.region(SINES):
        h = x.sin()
        y = h.cos()
    h.untyped_storage().resize_(0)
    accelerator.advance(1000)
    del h

    with pytest.raises(RuntimeError, match="freed or resized while it was being copied"):
        y.sum().backward()
    assert accelerator.take_violations() == ["copy 1 reads from memory that was freed"]


@pytest.mark.parametrize("regrows", [False, True])
@pytest.mark.parametrize("keep", [0, 1])
def test_storage_that_gets_other_memory_before_the_copy_ran(keep, regrows):
    x = torch.randn(4, requires_grad=True)
    with fake_accelerator(keep_last=keep) as fake:
        with ebb.region(SINES):
            h = x.sin()
            y = h.cos()
        storage = h.untyped_storage()
        storage.resize_(0)
        if regrows:
            storage.resize_(1 << 20)
        del h, storage
        with pytest.raises(RuntimeError, match="freed or resized while it was being copied"):
            y.sum().backward()
        fake.advance(1000)
        fake.take_violations()


# Lives and deaths


def test_retain_graph(accelerator):
    x = torch.randn(4, requires_grad=True)
    with ebb.region(OFFLOAD_ALL):
        y = chain_of_sines(x).sum()
    accelerator.advance(1000)
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    accelerator.advance(2)
    second = torch.autograd.grad(y, x)[0]

    assert torch.equal(first, second)


@pytest.mark.parametrize("advance", [0, 1, 3, 1000])
@pytest.mark.parametrize("keep", [0, 2])
def test_a_forward_without_backward_leaves_nothing(advance, keep, no_objects_left):
    x = torch.randn(4, requires_grad=True)
    with fake_accelerator(keep_last=keep) as fake:
        for _ in range(3):
            with ebb.region(OFFLOAD_ALL):
                y = chain_of_sines(x)
            fake.advance(advance)
            del y
        fake.advance(1000)
        stats = ebb.offload.stats()
        assert stats["stashes"] == stats["host_bytes_used"] == stats["in_flight_bytes"] == 0


def test_an_exception_in_the_region_leaves_nothing(accelerator, no_objects_left):
    x = torch.randn(4, requires_grad=True)
    with contextlib.suppress(ZeroDivisionError), ebb.region(OFFLOAD_ALL):
        y = chain_of_sines(x)
        raise ZeroDivisionError
    accelerator.advance(2)
    with ebb.region(OFFLOAD_ALL):
        y = chain_of_sines(x)
    y.sum().backward()
    del y
    accelerator.advance(1000)

    assert ebb.offload.stats()["stashes"] == ebb.offload.stats()["host_bytes_used"] == 0


def test_without_gradients_nothing_is_sent_for_autograd(accelerator):
    x = torch.randn(4, requires_grad=True)
    with torch.no_grad(), ebb.region(ebb.Policy(default=ebb.OFFLOAD)):
        for _ in range(10):
            chain_of_sines(x)
    accelerator.advance(1000)

    assert ebb.offload.stats()["stashes"] == 0


@pytest.mark.parametrize("seed", range(10))
def test_random_schedules(seed):
    """Forwards, backwards, early releases, exceptions and retained graphs in any order."""
    draw = random.Random(seed)
    x = torch.randn(8, requires_grad=True)
    expected = {n: gradients(chain_of_sines(x, n).sum(), x)[0] for n in range(1, 6)}
    settings = {
        "in_flight_bytes": draw.choice([0, 64, 1 << 30]),
        "prefetch_bytes": draw.choice([0, 64, 1 << 30]),
        "pinned_limit": draw.choice([256, 1 << 30]),
        "keep_last": draw.choice([0, 1, 3]),
    }
    with fake_accelerator(**settings) as fake:
        graphs = []
        for _ in range(1000):
            fake.use_stream(draw.choice([0, 0, 0, 1]))
            action = draw.choice(
                ["forward", "forward", "backward", "twice", "drop", "advance", "fail"]
            )
            if action == "forward":
                length = draw.randint(1, 5)
                with ebb.region(draw.choice([OFFLOAD_ALL, SINES, *POLICIES.values()])):
                    graphs.append((length, chain_of_sines(x, length).sum()))
            elif action == "fail":
                with contextlib.suppress(ZeroDivisionError), ebb.region(OFFLOAD_ALL):
                    chain_of_sines(x)
                    raise ZeroDivisionError
            elif action == "advance":
                fake.advance(draw.randint(1, 10))
            elif graphs:
                length, loss = graphs.pop(draw.randrange(len(graphs)))
                if action != "drop":
                    for retain in [True, False] if action == "twice" else [False]:
                        found = torch.autograd.grad(loss, x, retain_graph=retain)[0]
                        assert torch.equal(found, expected[length])
        fake.use_stream(0)
        del graphs, loss
        fake.advance(1 << 30)
        stats = ebb.offload.stats()
        assert stats["stashes"] == stats["host_bytes_used"] == stats["in_flight_bytes"] == 0


def test_threads(accelerator):
    """Each trains for itself; the engine is shared."""
    wrong = []

    def train(seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(64, generator=generator).requires_grad_()
        expected = gradients(chain_of_sines(x, 5).sum(), x)[0]
        for _ in range(100):
            with ebb.region(OFFLOAD_ALL):
                y = chain_of_sines(x, 5)
            accelerator.advance(3)
            if not torch.equal(gradients(y.sum(), x)[0], expected):
                wrong.append(seed)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong
    finish_copies(accelerator)
    assert ebb.offload.stats()["stashes"] == ebb.offload.stats()["host_bytes_used"] == 0


def test_a_fetch_ahead_that_finds_no_memory_does_no_harm(accelerator):
    x = torch.randn(64, requires_grad=True)
    expected = gradients(chain_of_sines(x, 5).sum(), x)[0]
    with ebb.region(OFFLOAD_ALL):
        y = chain_of_sines(x, 5)
    finish_copies(accelerator)
    accelerator.fail_allocations_after(1)
    assert y.grad_fn._saved_self is not None
    with pytest.raises(RuntimeError, match="device has no memory"):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    accelerator.fail_allocations_after(1 << 30)
    assert torch.equal(gradients(y.sum(), x)[0], expected)


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_bytes": -1}, "min_bytes must be from 0"),
        ({"min_bytes": "big"}, "min_bytes must be a number of bytes, such as"),
        ({"pinned_limit": "3 GB"}, "units: B, KiB"),
        ({"in_flight_bytes": 1 << 64}, "in_flight_bytes must be from 0"),
        ({"keep_last": -2}, "keep_last must be from 0"),
    ],
)
def test_wrong_settings(settings, message):
    before = ebb.offload.settings()
    with pytest.raises(ValueError, match=message):
        ebb.offload.configure(**settings)
    assert ebb.offload.settings() == before


@pytest.mark.parametrize("value", [1.5, True, b"1", [1]])
def test_settings_of_wrong_types(value):
    for name in ("min_bytes", "keep_last"):
        with pytest.raises(TypeError, match=f"{name} must be an int"):
            ebb.offload.configure(**{name: value})


def test_sizes_as_text():
    before = ebb.offload.settings()
    ebb.offload.configure(min_bytes="2.5KiB", prefetch_bytes="3 mib", in_flight_bytes="7")
    found = ebb.offload.settings()
    ebb.offload.configure(**before)

    assert found["min_bytes"] == 2560
    assert found["prefetch_bytes"] == 3 << 20
    assert found["in_flight_bytes"] == 7
    assert ebb.offload.settings() == before


@pytest.mark.parametrize(
    ("variable", "value", "output"),
    [
        ("MIN_BYTES", "4KiB", "4096"),
        ("MIN_BYTES", "many", "EBB_OFFLOAD_MIN_BYTES"),
        ("KEEP_LAST", "3", "3"),
        ("KEEP_LAST", "x", "EBB_OFFLOAD_KEEP_LAST"),
    ],
)
def test_environment_variables(variable, value, output):
    done = subprocess.run(
        [sys.executable, "-c", f"import ebb; print(ebb.offload.settings()['{variable.lower()}'])"],
        env=os.environ | {f"EBB_OFFLOAD_{variable}": value},
        capture_output=True,
        text=True,
    )
    assert output in (done.stdout if done.returncode == 0 else done.stderr)


def test_policies_that_offload():
    assert ebb.policies.offload_inputs == ebb.Policy(inputs=ebb.OFFLOAD)
    assert ebb.policies.offload_inputs.inputs is ebb.OFFLOAD
    assert ebb.policies.recompute_all.inputs is ebb.SAVE
    assert "inputs=ebb.OFFLOAD" in repr(ebb.policies.offload_inputs)
    with pytest.raises(ValueError, match="SAVE or OFFLOAD"):
        ebb.Policy(inputs=ebb.RECOMPUTE)
    with pytest.raises(TypeError, match="inputs must be"):
        ebb.Policy(inputs="offload")
