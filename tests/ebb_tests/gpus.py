"""Shared by the tests in tests/gpu."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

import ebb
from ebb import _testing
from ebb_tests import TESTS, dry_cuda

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]

NEEDS_GPU = [
    pytest.mark.needs_cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
NEEDS_TWO_GPUS = [
    pytest.mark.needs_cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]

# Why a test cannot run on the dry CUDA runtime (tests/ebb_tests/dry_cuda).
REPLAYS_GRAPHS = pytest.mark.not_dry("kernels do not run when a captured graph is replayed")
USES_CUDNN = pytest.mark.not_dry("cuDNN needs a GPU")
RUNS_PAGE_KERNELS = pytest.mark.not_dry("page pools run kernels of ebb")
ASSERTS_ON_DEVICE = pytest.mark.not_dry("a kernel must fail")
SLEEPS = pytest.mark.not_dry("a sleep kernel must run")
DRAWS_NUMBERS = pytest.mark.not_dry("random numbers of CUDA's kernels")
IS_LARGE = pytest.mark.not_dry("too large for a CPU; tests/dry_cuda has smaller ones")

# Cycles of a sleep kernel: more than half a second on today's GPUs. The host launches the kernels
# of a test in far less time.
CYCLES = 1_000_000_000

OFFLOAD_ALL = ebb.Policy(default=ebb.OFFLOAD, inputs=ebb.OFFLOAD)
PAGE_ALL = ebb.Policy(default=ebb.PAGE, inputs=ebb.PAGE)


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether all have the same bits."""
    return all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def bits_of_eager(run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """Eager's results. Skips the test if two eager runs give different bits."""
    first, second = run(), run()
    if not same(first, second):
        pytest.skip("eager itself gives other bits from run to run")
    return first


def chain(x: Tensor, length: int = 6) -> Tensor:
    """A chain of ops that save their inputs."""
    for _ in range(length):
        x = x.sin().cos()
    return x


def eager_region():
    return torch.enable_grad()


def offload_region():
    return ebb.region(OFFLOAD_ALL)


def page_region():
    return ebb.region(PAGE_ALL)


class Paged:
    """Layers on padded rows. Padding rows do not reach the loss, and no code reads the number of
    valid rows on the host."""

    def __init__(self, valid: int = 300, layers: int = 3, rows: int = 512, width: int = 64):
        self.x = torch.randn(rows, width, device="cuda")
        self.count = torch.tensor(valid, device="cuda")
        self.weights = [
            torch.randn(width, width, device="cuda").div_(8).requires_grad_() for _ in range(layers)
        ]

    def set(self, valid: int) -> None:
        """Other numbers, of which so many rows are valid."""
        self.count.fill_(valid)
        self.x.copy_(torch.randn_like(self.x))

    def loss(self, region: Callable[[], contextlib.AbstractContextManager[object]]) -> Tensor:
        """In a `page_region` the layers mark their rows."""
        lives = (torch.arange(len(self.x), device=self.x.device) < self.count).unsqueeze(1)
        x = torch.where(lives, self.x, 0)
        for w in self.weights:
            with region():
                h = x * 1.5
                if region is page_region:
                    h = ebb.experimental.mark_rows(h, self.count)
                x = layer_norm(gelu(h @ w), w.shape[:1])
        return torch.where(lives, x, 0).sin().sum()

    def gradients(
        self, region: Callable[[], contextlib.AbstractContextManager[object]]
    ) -> Sequence[Tensor]:
        return torch.autograd.grad(self.loss(region), self.weights)


def leaf(mebibytes: int = 4, device: str = "cuda") -> Tensor:
    return torch.randn(mebibytes * MIB // 4, device=device, requires_grad=True)


def notice_finished_copies() -> None:
    """Waits for all copies, and lets the offload engine process the finished ones."""
    torch.cuda.synchronize()
    _testing.release_offloaded()


def is_back_before_the_device(work: Callable[[], object]) -> bool:
    """True if `work` does not wait for the device: it returns while a sleep kernel still runs.

    Call this twice and use the second result: the first run may load kernels and allocate memory,
    which can wait for the device.
    """
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    behind = torch.cuda.Event()
    behind.record()
    work()
    sleeps = not behind.query()
    torch.cuda.synchronize()
    return sleeps


@contextlib.contextmanager
def offloading(**settings: object) -> Iterator[None]:
    """Changes settings of OFFLOAD and offloads tensors of any size. Waits for copies at the end."""
    named = {f"offload.{name}": value for name, value in settings.items()}
    with ebb.config.patch(named, offload_min_bytes=0):
        try:
            yield
        finally:
            torch.cuda.synchronize()
            _testing.drain_offload()


@contextlib.contextmanager
def memory_nearly_full(room: int) -> Iterator[None]:
    """Allocates all of the device's free memory except `room` bytes."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(free - room, dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        del ballast
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def run_in_a_process(
    code: str, seconds: float = 100, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs code in another process, as it may make CUDA or torch's allocator unusable."""
    if dry_cuda.gives_values():
        code = f"from ebb_tests import dry_cuda; dry_cuda.give_values()\n{code}"
    folders = [str(Path(ebb.__file__).parents[1]), str(TESTS)]
    path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path} | variables,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def assert_ended_well(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def warmed_up_stream(work: Callable[[], object], runs: int = 3) -> torch.cuda.Stream:
    """Runs `work` a few times on a side stream, as torch requires before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(runs):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    return side
