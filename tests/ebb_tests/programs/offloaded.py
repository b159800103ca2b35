"""Shared by the tests of OFFLOAD."""

from __future__ import annotations

import contextlib
from random import Random

import torch

import ebb
from ebb import _testing

OFFLOAD_ALL = ebb.Policy(default=ebb.OFFLOAD, inputs=ebb.OFFLOAD)
SINES = ebb.Policy({"aten::sin": ebb.OFFLOAD})

POLICIES = {
    "all": OFFLOAD_ALL,
    "inputs": ebb.policies.offload_inputs,
    "products": ebb.Policy({"aten::*mm": ebb.OFFLOAD, "aten::gelu": ebb.SAVE}),
    "mixed": ebb.Policy(
        {"aten::*mm": ebb.OFFLOAD, "aten::native_layer_norm": ebb.SAVE}, inputs=ebb.OFFLOAD
    ),
}


def chain_of_sines(x, length=3):
    """A chain whose ops save their inputs. Nothing else refers to these inputs, except `x`."""
    for _ in range(length):
        x = x.sin().cos()
    return x


def sine_and_cosine(x):
    """A sine, and its cosine, which saves it."""
    h = x.sin()
    return h, h.cos()


def forward(x, length=3, policy=OFFLOAD_ALL, name="region"):
    """The sum of a chain that runs in a region."""
    with ebb.region(policy, name):
        return chain_of_sines(x, length).sum()


def assert_exact(y, x, length=3):
    """Checks that the gradient of the sum of a chain has the bits of eager's."""
    found, expected = gradients(y, x)[0], gradients(chain_of_sines(x, length).sum(), x)[0]
    assert torch.equal(found, expected), f"{found} instead of {expected}"


def overwritten(x, write=torch.Tensor.zero_):
    """A result that a replay of the old contents of `h` needs. `h` is sent, and then written."""
    h = x.sin()
    h.cos()  # saves h, which so is sent; nothing comes of it
    y = (h * 2).exp()  # saves its result; `h * 2` reads h
    with torch.no_grad():
        write(h)
    return y


def assert_nothing_is_away():
    stats = ebb.stats()["offload"]
    assert stats["stashes"] == stats["host_bytes_used"] == stats["in_flight_bytes"] == 0, stats


def finish_copies(fake):
    """Runs all queued copies of the fake, and lets the engine release the device memory, as it does
    some regions later."""
    fake.advance(1 << 30)
    _testing.release_offloaded()


def gradients(loss, inputs):
    return torch.autograd.grad(loss, inputs)


def drawn_settings(draw: Random):
    """Random settings of OFFLOAD: each limit is small or large."""
    return {
        "in_flight_bytes": draw.choice([0, 64, 1 << 30]),
        "prefetch_bytes": draw.choice([0, 64, 1 << 30]),
        "pinned_limit": draw.choice([256, 1 << 30]),
        "keep_last": draw.choice([0, 1, 3]),
    }


def check_random_schedule(draw: Random, x, *, steps, actions=(), longest=5, fake=None):
    """Runs random actions and compares each gradient with eager's.

    Actions are forwards, backwards (also with a retained graph), dropped graphs, and those that
    `actions` names. So backward may need values that are on the host, on the device, or in a copy.
    """
    policies = [OFFLOAD_ALL, SINES, *POLICIES.values()]
    lengths = range(1, longest + 1)
    expected = {n: gradients(chain_of_sines(x, n).sum(), x)[0] for n in lengths}
    graphs = []
    for _ in range(steps):
        action = draw.choice(["forward", "forward", "backward", "twice", "drop", *actions])
        if action == "forward":
            length = draw.choice(lengths)
            with ebb.region(draw.choice(policies)):
                graphs.append((length, chain_of_sines(x, length).sum()))
        elif action == "fail":
            with contextlib.suppress(ZeroDivisionError), ebb.region(OFFLOAD_ALL):
                chain_of_sines(x)
                raise ZeroDivisionError
        elif action == "advance":
            fake.advance(draw.randint(1, 10))
        elif action == "stream":
            fake.use_stream(draw.choice([0, 0, 0, 1]))
        elif graphs:
            length, loss = graphs.pop(draw.randrange(len(graphs)))
            for retain in {"twice": [True, False], "backward": [False]}.get(action, []):
                found = torch.autograd.grad(loss, x, retain_graph=retain)[0]
                assert torch.equal(found, expected[length])
            del loss
