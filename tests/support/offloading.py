"""Shared by the tests of OFFLOAD."""

from __future__ import annotations

import contextlib
from random import Random

import torch

import ebb

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
    """Each function's input is saved; each but the first is a result that nothing else holds."""
    for _ in range(length):
        x = x.sin().cos()
    return x


def finish_copies(fake):
    """All queued copies run, and the engine notices, as it does at each pack and unpack."""
    fake.advance(1 << 30)
    ebb.stats()["offload"]


def gradients(loss, inputs):
    return torch.autograd.grad(loss, inputs)


def drawn_settings(draw: Random):
    """Little room or much, for each kind of room."""
    return {
        "in_flight_bytes": draw.choice([0, 64, 1 << 30]),
        "prefetch_bytes": draw.choice([0, 64, 1 << 30]),
        "pinned_limit": draw.choice([256, 1 << 30]),
        "keep_last": draw.choice([0, 1, 3]),
    }


def check_random_schedule(draw: Random, x, *, steps, actions=(), longest=5, fake=None):
    """Forwards, backwards, early releases and retained graphs, and what `actions` names, in any
    order: what is needed next may be anywhere, or on its way. Each gradient is right, and no graph
    is left.
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
