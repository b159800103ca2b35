"""Verify mode: replays are compared with the forward, and what is dropped is poisoned."""

from __future__ import annotations

import ctypes
import itertools
import os
import pickle
import warnings

import pytest
import torch
from torch import nn

import ebb
from ebb_tests import fork_server
from ebb_tests.engines import current
from ebb_tests.exactness import exact, leaves, like_eager, run_process
from ebb_tests.memory_use import address_of, poke
from ebb_tests.stand_ins import kernel

pytestmark = pytest.mark.engines("device")


@pytest.fixture
def x():
    return leaves((4,))[0]


@pytest.fixture
def _verify():
    with ebb.verify():
        yield


@pytest.mark.usefixtures("_verify")
@exact((4, 4), (4, 4))
def test_an_exact_program_passes(x, w):
    h = torch.nn.functional.dropout(x @ w, 0.3)
    g = h.relu_().exp()
    product = g * h
    first, second = product[:2], product[2:]
    kept = first + 1
    first.mul_(2)
    return torch.cat((first + kept, second)).cumsum(0).sin() * torch.rand(4, 4)


@pytest.mark.usefixtures("_verify")
def test_values_are_recomputed_even_while_their_tensors_live(x):
    with ebb.region():
        h = x * 2
        loss = h.sin().sum()
    loss.backward()

    assert ebb.stats()["total"]["ops_replayed"] == 1
    assert h is not None


@pytest.mark.on_cpu("fused cells have kernels for the CPU and CUDA only")
@pytest.mark.usefixtures("_verify")
def test_workspaces_are_not_compared():
    net = nn.LSTM(4, 4)
    x = torch.randn(5, 2, 4, requires_grad=True)
    with ebb.region():
        loss = net(x)[0].sin().exp().sum()
    loss.backward()


ATTENTION = {
    "_scaled_dot_product_efficient_attention": (None, True),
    "_scaled_dot_product_flash_attention": (),
    "_scaled_dot_product_cudnn_attention": (None, True),
}


@pytest.mark.usefixtures("_verify")
@pytest.mark.parametrize("name", ATTENTION)
def test_the_random_state_of_attention_without_dropout_is_not_compared(name):
    """Kernels of accelerators return it unwritten. A stand-in for them, with its backward."""
    calls = itertools.count()

    def number():
        return torch.full((), next(calls))

    def forward(q, k, v, *rest, **more):
        one = q.sum(-1)
        if "efficient" in name:
            return q + k + v, one, number(), number()
        return q + k + v, one, None, None, 4, 4, number(), number(), q.new_empty(0)

    def backward(gradient, *rest, **more):
        made = (gradient * 1, gradient * 1, gradient * 1)
        return (*made, None) if "efficient" in name else made

    key = current().dispatch_key
    with kernel(name, forward, key), kernel(f"{name}_backward", backward, key):
        x = torch.randn(1, 2, 4, 8, requires_grad=True)
        with ebb.region():
            q, k, v = x * 1, x * 2, x * 3
            made = getattr(torch.ops.aten, name).default(q, k, v, *ATTENTION[name])
            loss = made[0].sin().sum()
            assert next(calls) >= 2
            del q, k, v, made
        loss.backward()
        assert ebb.stats()["total"]["ops_replayed"] > 3
        assert x.grad is not None


@pytest.mark.parametrize("alive", [False, True])
def test_an_unseen_write_is_found_and_named(alive, x):
    with ebb.verify(), ebb.region(name="block"):
        h = x * 2
        poke(h, (float(h[0].detach()) + 0.5,))
        g = h + 1
        loss = (g * g).sum()
        if not alive:
            del h, g

    message = (
        r"aten::mul.Tensor in region 'block' .*in result 0: 1 of 4 elements, the largest "
        r"difference is 0.5. Likely causes: 1. .*ebb.opaque.* 2. .*EBB_VERIFY=demote"
    )
    with pytest.raises(ebb.ReplayMismatch, match=message) as raised:
        loss.backward()
    error = raised.value
    assert isinstance(error, RuntimeError)
    assert (error.region, error.op, error.output) == ("block", "aten::mul.Tensor", "result 0")
    assert error.largest_difference == 0.5
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.op == error.op


def test_a_write_on_which_no_gradient_depends_is_no_error(x):
    with ebb.verify(), ebb.region():
        h = x * 2
        g = h + 1
        poke(h)
        loss = (g * g).sum()
    loss.backward()

    assert torch.equal(x.grad, torch.autograd.grad(((x * 2 + 1) ** 2).sum(), x)[0])


@pytest.mark.parametrize(
    ("dtype", "size", "at"),
    [(torch.float64, 1000, 333), (torch.float32, 5, 4)],
    ids=["between samples of a fingerprint", "the last bytes"],
)
def test_a_write_into_an_input_names_the_op_and_the_argument(dtype, size, at, x):
    w = torch.ones(size, dtype=dtype)
    with ebb.verify(), ebb.region():
        h = x * w.sin().sum()
        loss = h.exp().sum()
    poke(w[at:], (0.0,))

    with pytest.raises(ebb.ReplayMismatch, match=r"aten::sin.default.*input 'self' has changed"):
        loss.backward()


def test_marked_writes_pass(x):
    with ebb.verify(), ebb.region():
        h = x * 2
        with ebb.opaque(h):
            poke(h)
        loss = h.sin().sum()
    loss.backward()


def test_written_arguments_are_named(x):
    with ebb.verify(), ebb.region():
        h = x * 2
        h.add_(1)
        poke(h)
        loss = h.sin().sum()
    with pytest.raises(ebb.ReplayMismatch, match=r"aten::add_.Tensor.*argument 0, which it writes"):
        loss.backward()


@pytest.fixture
def counter():
    """An operator that gives something else each time."""
    calls = itertools.count(1)
    with torch.library._scoped_library("ebb_verify_test", "FRAGMENT") as library:
        library.define("count(Tensor x) -> Tensor")
        library.impl("count", lambda x: x + next(calls), current().dispatch_key)
        yield torch.ops.ebb_verify_test.count


def test_an_operator_with_hidden_state_is_found(counter, x):
    policy = ebb.Policy({"ebb_verify_test::count": ebb.RECOMPUTE})
    with ebb.verify(), ebb.region(policy):
        loss = (x * counter(x.detach())).exp().sum()
    with pytest.raises(ebb.ReplayMismatch, match=r"ebb_verify_test::count") as raised:
        loss.backward()
    assert raised.value.largest_difference == 1


def test_demote_warns_once_uses_the_right_bytes_and_saves_from_then_on(counter, x):
    policy = ebb.Policy({"ebb_verify_test::count": ebb.RECOMPUTE})

    def step():
        with ebb.region(policy):
            h = x * counter(x.detach())
            loss = h.exp().sum()
        with torch.no_grad():
            expected = (h.exp() * (h / x)).clone()
        del h
        return torch.autograd.grad(loss, x)[0], expected

    with ebb.verify("demote"):
        with pytest.warns(
            UserWarning, match="replay mismatch: the replay of ebb_verify_test::count"
        ):
            actual, expected = step()
        torch.testing.assert_close(actual, expected)
        assert ebb.stats()["demoted_ops"][-1] == "ebb_verify_test::count.default"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            actual, expected = step()
        torch.testing.assert_close(actual, expected)
    before = counter(torch.zeros(()))
    step()  # saved without verification too: the operator runs once, in the forward
    assert counter(torch.zeros(())) == before + 2


@pytest.mark.on_cpu("see tests/accelerator/test_device_verify.py", run=False)
@pytest.mark.parametrize("mode", ["off", "raise"])
def test_what_is_dropped_is_poisoned(mode):
    def look(tensor_from):
        """What a raw pointer shows once its tensor is gone; the allocator uses the first words."""
        h = tensor_from(leaves((100,))[0] * 2)
        words = (ctypes.c_uint64 * 100).from_address(address_of(h))
        del h
        return words[10:]

    floating = integers = 0
    for _ in range(20):  # somebody may get the memory in between
        with ebb.verify(mode), ebb.region():
            floating += look(lambda h: h.exp()).count(2**64 - 1) > 80
            integers += look(lambda h: h.argsort()).count(0xA5A5A5A5A5A5A5A5) > 80
    assert (floating > 10) == (integers > 10) == (mode == "raise")
    assert mode == "raise" or floating == integers == 0


POISONED = """
import ctypes, sys, torch, ebb
if sys.argv[1] == "counted":
    ebb._C.use_counting_allocator()
found = 0
for _ in range(20):
    with ebb.verify(), ebb.region():
        h = torch.ones(100, dtype=torch.float64, requires_grad=True).exp()
        words = (ctypes.c_uint64 * 100).from_address(h.data_ptr())
        del h
        found += words[10:].count(2**64 - 1) > 80
print(found > 10)
"""


@pytest.mark.on_cpu("see tests/accelerator/test_device_verify.py", run=False)
@pytest.mark.parametrize("memory", ["counted", "not counted"])
def test_what_is_dropped_is_poisoned_while_a_budget_counts_memory(memory):
    """With EBB_BUDGET, another allocator frees the memory of tensors."""
    assert run_process(["-c", POISONED, memory]) == "True\n"


@pytest.mark.on_cpu("see tests/accelerator/test_device_verify.py", run=False)
def test_a_custom_function_that_kept_a_raw_pointer_reads_poison():
    seen = []

    class Watch(torch.autograd.Function):
        """Keeps a raw pointer into a tensor that eager's autograd would have kept alive."""

        @staticmethod
        def forward(ctx, h):
            ctx.save_for_backward(h)
            ctx.words = (ctypes.c_double * 100).from_address(address_of(h))
            return h.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch.tensor(ctx.words[10:]).isnan().any())
            return grad

    for region in (torch.enable_grad(), ebb.region()):
        x = leaves((100,))[0]
        with ebb.verify(), region:
            out = Watch.apply(x * 2)
        out.sum().backward()
    assert seen == [False, True]


@pytest.mark.on_cpu("see tests/accelerator/test_device_verify.py", run=False)
def test_memory_dies_as_without_verification(x):
    alive = []
    with ebb.verify(), ebb.region():
        h = x * 2
        alive.append(torch.multiprocessing.reductions.StorageWeakRef(h.untyped_storage()))
        loss = h.sin().sum()
        del h
        assert alive[0].expired()
    loss.backward()


@pytest.mark.usefixtures("_verify")
@like_eager(ebb.policies.recompute_all)
def test_double_backward_and_retained_graphs(region):
    x = leaves((4,))[0]
    with region:
        y = (x * 2).sin() * x.exp()
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    first = torch.autograd.grad(g.square().sum(), x, retain_graph=True)[0]
    return g.detach(), first, torch.autograd.grad(g.square().sum(), x)[0]


def test_writes_between_two_backwards_are_found(x):
    with ebb.verify(), ebb.region():
        h = x * 2
        y = h.sin().sum()
    torch.autograd.grad(y, x, retain_graph=True)
    poke(h)
    with pytest.raises(ebb.ReplayMismatch, match=r"aten::mul.Tensor"):
        torch.autograd.grad(y, x)


def test_the_mode_is_set_back():
    with ebb.verify():
        with ebb.verify("off"):
            x = leaves((4,))[0]
            with ebb.region():
                h = x * 2
                loss = h.sin().sum()
            poke(h)
            loss.backward()  # not compared, and the living tensor is used, as in eager
        assert ebb.verify("raise")._before == 1
    assert ebb._C.verify_mode() in (0, 1)


PROGRAM = """
import ctypes, torch, ebb
x = torch.ones(4, requires_grad=True)
with ebb.region():
    h = x * 2
    ctypes.c_float.from_address(h.data_ptr()).value = 7
    loss = h.sin().sum()
loss.backward()
print(x.grad[0] == 2 * torch.tensor(7.0).cos())
"""


@pytest.mark.once
@pytest.mark.parametrize(
    ("value", "output"),
    [
        ("0", "True"),
        ("1", "ReplayMismatch: ebb: replay mismatch: the replay of aten::mul"),
        ("demote", "UserWarning: ebb: replay mismatch: the replay of aten::mul"),
        ("yes", "ReplayMismatch: ebb: replay mismatch: the replay of aten::mul"),
        ("off", "True"),
        ("maybe", "EBB_VERIFY=maybe is ignored: it must be 0, 1 or demote"),
    ],
)
def test_environment_variable(value, output):
    run = fork_server.run(["-c", PROGRAM], env=os.environ | {"EBB_VERIFY": value})
    assert output in run.stdout + run.stderr
    assert (run.returncode == 0) == (value not in ("1", "yes"))
    told = "of 1 recomputed tensors that backward read, 1 differed" in run.stderr
    assert told == (value in ("1", "yes", "demote"))


@pytest.mark.once
@pytest.mark.parametrize(
    ("policy", "line"),
    [
        (
            "recompute_all",
            "of 2 recomputed tensors that backward read, 0 differed from the forward's",
        ),
        ("save_all", "nothing was compared, because backward read no recomputed tensor"),
    ],
)
def test_the_variable_prints_what_was_compared(policy, line):
    program = (
        "import torch, ebb\n"
        "x = torch.ones(4, requires_grad=True)\n"
        f"with ebb.region(ebb.policies.{policy}):\n"
        "    y = (x * 2).sin().exp()\n"
        "y.sum().backward()\n"
    )
    run = fork_server.run(["-c", program], env=os.environ | {"EBB_VERIFY": "1"})
    assert run.stderr.splitlines() == [f"ebb: EBB_VERIFY: {line}"]


def test_compared_tensors_are_counted(x):
    compared, differing = ebb._C.verify_counts()
    with ebb.verify():
        with ebb.region():
            y = (x * 2).sin().exp()
        y.sum().backward()
    assert ebb._C.verify_counts() == (compared + 2, differing)
