"""Shared by the tests of paging: programs with valid rows and padding rows."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
import weakref
from collections.abc import Iterator

import torch
from torch.nn.functional import gelu, layer_norm, silu
from torch.utils._python_dispatch import TorchDispatchMode

import ebb
from ebb_tests import TESTS

EVERYTHING = ebb.Policy(default=ebb.PAGE, inputs=ebb.PAGE)
PRODUCTS = ebb.Policy({"aten::mm": ebb.PAGE, "aten::addmm": ebb.PAGE})
PAGES = {"everything": EVERYTHING, "products": PRODUCTS}


class Keep(torch.autograd.Function):
    """Saves its input. A test can unpack it at any time by `Keep.last.saved_tensors`."""

    last: torch.autograd.function.FunctionCtx | None = None

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        Keep.last = ctx
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


def paged(x, n, names=("only",)):
    """Pages `x + 1`, `x + 2`, .. in regions with these names.

    Returns a pair for each: the context whose saved tensor it is, and a tensor that keeps the graph
    alive.
    """
    kept = []
    for number, name in enumerate(names, 1):
        with ebb.region(EVERYTHING, name):
            y = Keep.apply(ebb.experimental.mark_rows(x + number, n))
        kept.append((Keep.last, y))
    return kept


def page_and_bring_back(x, n):
    """Pages and restores one layer while its graph is alive (torch 2.11 requires this)."""
    ((ctx, _alive),) = paged(x, n)
    assert ctx.saved_tensors


def is_right(found, x, number):
    """True if the valid rows of `found` equal those of `x + number`."""
    return torch.equal(found[:20].cpu(), (x + number)[:20].detach().cpu())


def wait_for_all(device, streams):
    """Makes the current stream and all of `streams` wait for each other."""
    current = torch.accelerator.current_stream(device)
    for stream in streams:
        current.wait_stream(stream)
    for stream in streams:
        stream.wait_stream(current)


def programs_of(file):
    """A file of tests/paging as a module of its own, `programs_` and its name."""
    name = f"programs_{file}"
    path = TESTS / "paging" / f"{file}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def asks_when_it_dies(storage):
    """Checks, when `storage` is freed, that another thread can call `ebb._C.paging_stats`.

    Returns a list that then contains one bool.
    """
    found = []

    def ask():
        thread = threading.Thread(target=ebb._C.paging_stats, daemon=True)
        thread.start()
        thread.join(5)
        found.append(not thread.is_alive())

    weakref.finalize(storage, ask)
    return found


def forget():
    """Drops all pools, and overflow errors that no test has read."""
    ebb.experimental.paging.reset()
    with contextlib.suppress(RuntimeError):
        ebb.experimental.paging.step_ok()
    ebb.experimental.paging.reset()


@contextlib.contextmanager
def fresh(**settings: object) -> Iterator[None]:
    """Runs the with-block without pools and with these settings. Restores the settings."""
    forget()
    with ebb.config.patch({f"paging.{name}": value for name, value in settings.items()}):
        try:
            yield
        finally:
            forget()


class Seen(TorchDispatchMode):
    """A dispatch mode that records the names of operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


class Mlp:
    """Layers on padded rows. Padding rows of the input may have any contents."""

    def __init__(self, layers=3, width=8, rows=40, seed=0, device=None):
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.width = rows, width
        self.device = device or torch.get_default_device()
        self.weights = [
            (torch.randn(width, width, generator=generator, device="cpu") / 3)
            .to(self.device)
            .requires_grad_()
            for _ in range(2 * layers)
        ]

    def layer(self, h, index):
        up, down = self.weights[2 * index : 2 * index + 2]
        return layer_norm(h + gelu(h @ up) @ down, (self.width,)) * silu(h)

    def inputs(self, seed):
        generator = torch.Generator().manual_seed(100 + seed)
        x = torch.randn(self.rows, self.width, generator=generator, device="cpu")
        return x.to(self.device).requires_grad_()

    def run_layers(self, x, n, region):
        """Runs each layer in `region`, and marks the layer's input there."""
        for index in range(len(self.weights) // 2):
            with region():
                h = ebb.experimental.mark_rows(x.mul(1.5), n)
                x = self.layer(h, index)
        return x

    def __call__(self, x, n, region=contextlib.nullcontext):
        return self.run_layers(x, n, region)[: int(n)].square().sum()


class Masked(Mlp):
    """An `Mlp` whose forward never reads the number of valid rows on the host."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.places = torch.arange(self.rows, device="cpu").unsqueeze(1).to(self.device)

    def live(self, n):
        return torch.tensor(n).to(self.device)

    def __call__(self, x, n, region=contextlib.nullcontext):
        lives = self.places < n
        x = self.run_layers(torch.where(lives, x, 0), n, region)
        return torch.where(lives, x, 0).square().sum()


def masked(device, live=20, **options):
    """A `Masked`, its input, and the number of valid rows, all on the device."""
    net = Masked(device=device, **options)
    return net, net.inputs(0), net.live(live)


def maybe_step(bracketed, fixed_order=True):
    return ebb.experimental.paging.step(fixed_order) if bracketed else contextlib.nullcontext()


STEPS = {
    "in order": ebb.experimental.paging.step,
    "in any order": lambda: ebb.experimental.paging.step(False),
    "not bracketed": contextlib.nullcontext,
}


def gradients(net, x, n, region=contextlib.nullcontext):
    loss = net(x, n, region)
    return torch.autograd.grad(loss, [x, *net.weights])


def same(expected, found):
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(expected, found, strict=True))


def region():
    return ebb.region(EVERYTHING)


def products():
    return ebb.region(PRODUCTS)


def run(net, live, seed=0):
    """Eager's gradients, and the gradients of a step with PAGE."""
    x, n = net.inputs(seed), torch.tensor(live)
    return gradients(net, x, n), gradients(net, x, n, region)


def check(net, live):
    """Checks that a step with PAGE has eager's gradients, and that its pools had room."""
    expected, found = run(net, live)
    assert same(expected, found), f"{live} valid rows"
    assert ebb.experimental.paging.step_ok(), f"{live} valid rows"
