"""Models of several regions, for replays ahead of backward."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

import ebb
from ebb import _C, _testing
from ebb_tests import TESTS, fork_server
from ebb_tests import device as late
from ebb_tests.exactness import same_bits
from ebb_tests.programs.paged import Masked
from ebb_tests.replays import replays_ahead, wait_for_replays


def give_other_memory(tensor: torch.Tensor) -> None:
    """Gives the tensor's storage other memory with arbitrary contents, as compiled programs do.

    Calls only operators: ebb sees neither a method of `torch.Tensor` nor a Python storage object.
    """
    storage_of, address = tensor.detach(), torch._C.TensorBase.data_ptr
    before, others = address(tensor), []
    while address(tensor) == before:
        torch.ops.inductor.resize_storage_bytes_(storage_of, 0)
        others.append(torch.empty_like(storage_of))
        torch.ops.inductor.resize_storage_bytes_(storage_of, tensor.nbytes)


class _Acts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, act: Callable[[], object]) -> torch.Tensor:
        ctx.act = act
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            ctx.act()
        return gradient, None


def in_backward(x: torch.Tensor, act: Callable[[], object]) -> torch.Tensor:
    """`x`, whose backward calls `act`."""
    return _Acts.apply(x, act)


class WaitInBackward(torch.autograd.Function):
    """Its backward waits until no more replays can run ahead."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        wait_for_replays()
        return gradient


class Squeeze(WaitInBackward):
    """Replays that run ahead meanwhile find no memory on the test accelerator."""

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        with late.limited(device=0):
            return WaitInBackward.backward(ctx, gradient)


def counts(program: Callable[[], object]) -> dict[str, int]:
    """How the counts of `ebb.stats()["ahead"]` change while `program` runs."""
    wait_for_replays()
    before = ebb.stats()["ahead"]
    program()
    wait_for_replays()
    after = ebb.stats()["ahead"]
    return {name: after[name] - before[name] for name in before}


def counts_ahead(
    program: Callable[[], object], regions: int = 1, limit: int | str = "1GiB"
) -> dict[str, int]:
    """`counts` while replays run ahead."""
    with replays_ahead(regions, limit):
        return counts(program)


X = (2, 6, 16)  # the shape of the input of blocks


def region() -> ebb.region:
    return ebb.region(ebb.policies.recompute_all)


def chain(
    modules: Iterable[Callable[[torch.Tensor], torch.Tensor]],
    x: torch.Tensor,
    entered: Callable[[], contextlib.AbstractContextManager[object]] = region,
) -> torch.Tensor:
    """The modules one after the other, each in a region that waits in backward."""
    for module in modules:
        with entered():
            x = module(WaitInBackward.apply(x))
    return x


def two_regions(
    x: torch.Tensor,
    body: Callable[[torch.Tensor], torch.Tensor],
    hook: Callable[[torch.Tensor], None],
    entered: Callable[[], contextlib.AbstractContextManager[object]] = region,
) -> torch.Tensor:
    """The gradient of two regions; `body` is in the first one.

    `hook` runs when backward has been in the second one, and the worker is in the first.
    """
    with entered():
        h = body(x)
    h.register_hook(hook)
    with entered():
        out = (h * 2).sin().sum()
    return torch.autograd.grad(out, x)[0]


@contextlib.contextmanager
def room(limit: int = 1 << 40, used: int = 1) -> Iterator[None]:
    """Regions keep up to `limit` bytes that they could recompute. `used` seem to be in use."""
    _C.keep_while_there_is_room(limit)
    _testing.pretend_bytes_in_use(used)
    try:
        yield
    finally:
        _C.keep_while_there_is_room(0)
        _testing.pretend_bytes_in_use(0)


def all_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(same_bits, found, expected))


def assert_exact_ahead(
    program: Callable[..., Sequence[torch.Tensor]], *args: object, **settings: int
) -> dict[str, int]:
    """Checks that a program with replays ahead returns eager's bits. Returns their counts.

    Args:
        program: `program(entered, *args)` enters `entered()` around each part that is a region.
        settings: for `replays_ahead`.
    """
    expected = program(contextlib.nullcontext, *args)
    found: list[torch.Tensor] = []
    with replays_ahead(**settings):
        did = counts(lambda: found.extend(program(region, *args)))
    assert all_same(found, expected), did
    return did


class WaitingLayers(Masked):
    """Layers on padded rows. Backward waits for the worker before each layer."""

    def layer(self, h: torch.Tensor, index: int) -> torch.Tensor:
        return super().layer(WaitInBackward.apply(h), index)


def many_products(x: torch.Tensor, n: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Products on marked rows. Only one operator reads each, and backward needs its result."""
    h = ebb.experimental.mark_rows(x.mul(1.5), n)
    return torch.stack([((h @ weight) * 2).sin() for weight in weights]).sum(0)


def bytes_in_use_between_regions(device: torch.device, policy: ebb.Policy) -> int:
    """Bytes in use on the test accelerator when backward is between two regions of products.

    Reads them after all possible replays ahead have run.
    """
    weights = [(torch.randn(8, 8) / 3).to(device) for _ in range(8)]
    x, n = torch.randn(40, 8).to(device).requires_grad_(), torch.tensor(20).to(device)
    seen: list[int] = []

    def look(gradient: torch.Tensor) -> None:
        wait_for_replays()
        torch.accelerator.synchronize()
        seen.append(torch.ops.late.device_usage(0))

    h = x
    for _ in range(2):
        h.register_hook(look)
        with ebb.region(policy):
            h = many_products(h, n, weights)
    h.sum().backward()
    return seen[0]


class Block(nn.Module):
    def __init__(self, width: int = 16, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm(x)).view(batch, length, 3, 2, width // 2)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)


def blocks(count: int, dropout: float = 0.0) -> list[Block]:
    torch.manual_seed(1)
    return [Block(dropout=dropout) for _ in range(count)]


def parameters(modules: list[Block]) -> list[nn.Parameter]:
    return [p for module in modules for p in module.parameters()]


def in_a_process(
    script: str, *, seconds: int = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `script` in another process that can import the modules of the tests."""
    path = [str(TESTS), *sys.path]
    return fork_server.run(
        ["-W", "ignore", "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)} | environment,
        timeout=seconds,
    )
