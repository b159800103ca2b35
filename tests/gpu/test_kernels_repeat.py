"""A census of forward operators: which ones give the same bits in a second run. ebb recomputes the
operators of the first list, and keeps the results of those of the second: see Note [Kernels that do
not repeat their bits]."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ebb_tests import dry_cuda
from ebb_tests.gpus import MIB, NEEDS_GPU

pytestmark = NEEDS_GPU

ROWS = 512
DTYPES = [torch.float32, torch.bfloat16]


def attention(backend: SDPBackend) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        q = x.view(2, 4, 64, ROWS).transpose(2, 3)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, q.sin(), q.cos(), is_causal=True)

    return run


def weights(x: Tensor, *shape: int) -> Tensor:
    """The same numbers in each call, on the CPU first: the device's generator stays as it is."""
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator).to(x.device, x.dtype)


def image(x: Tensor) -> Tensor:
    return x.view(4, 32, 32, 64)


def volume(x: Tensor) -> Tensor:
    return x.view(2, 32, 8, 8, 64)


def transposed(x: Tensor, channels: int, kernel: int, stride: int) -> Tensor:
    return F.conv_transpose2d(image(x), weights(x, 32, channels, kernel, kernel), stride=stride)


REPEAT: dict[str, Callable[[Tensor], Tensor | Sequence[Tensor]]] = {
    "mm": lambda x: x @ x.t(),
    "mm, narrow": lambda x: x[:, :3].contiguous() @ x[:3].contiguous(),
    "mm, long": lambda x: x.view(8, -1) @ x.view(8, -1).t(),
    "mm, transposed": lambda x: x.t() @ x,
    "addmm": lambda x: torch.addmm(x[0], x, x),
    "addmm, gelu": lambda x: F.gelu(F.linear(x, x, x[0])),
    "bmm": lambda x: torch.bmm(x.view(4, 128, ROWS), x.view(4, ROWS, 128)),
    "baddbmm": lambda x: torch.baddbmm(x[0, :128], x.view(4, 128, ROWS), x.view(4, ROWS, 128)),
    "mv": lambda x: x @ x[0],
    "dot": lambda x: x[0] @ x[1],
    "conv2d": lambda x: F.conv2d(image(x), weights(x, 16, 32, 3, 3), padding=1),
    "conv2d, grouped": lambda x: F.conv2d(image(x), weights(x, 32, 1, 3, 3), groups=32),
    "conv2d, strided": lambda x: F.conv2d(image(x), weights(x, 16, 32, 5, 5), stride=2),
    "conv3d": lambda x: F.conv3d(volume(x), weights(x, 8, 32, 3, 3, 3)),
    **{
        f"conv_transpose2d, {c} channels, kernel {k}, stride {s}": (
            lambda x, c=c, k=k, s=s: transposed(x, c, k, s)
        )
        for c in (4, 32)
        for k in (2, 3, 5)
        for s in (1, 2)
    },
    "conv_transpose3d": lambda x: F.conv_transpose3d(volume(x), weights(x, 32, 4, 2, 2, 2)),
    "layer_norm": lambda x: F.layer_norm(x, (ROWS,), x[0], x[1]),
    "rms_norm": lambda x: F.rms_norm(x, (ROWS,), x[0]),
    "group_norm": lambda x: F.group_norm(image(x), 8),
    "instance_norm": lambda x: F.instance_norm(image(x)),
    "batch_norm": lambda x: F.batch_norm(image(x), None, None, training=True),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(ROWS, device=x.device)),
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(0),
    "mean": lambda x: x.mean(-1),
    "var_mean": lambda x: torch.var_mean(x, -1),
    "norm": lambda x: x.norm(),
    "prod": lambda x: x.sigmoid().prod(-1),
    "max": lambda x: x.round().max(-1),
    "topk": lambda x: x.round().topk(5),
    "sort": lambda x: x.round().sort(stable=True),
    "argmax": lambda x: x.round().argmax(-1),
    "gelu": F.gelu,
    "silu": F.silu,
    "pow": lambda x: x.abs().pow(1.7),
    "erfinv": lambda x: x.tanh().mul(0.9).erfinv(),
    "embedding": lambda x: F.embedding(torch.arange(0, ROWS, 3, device=x.device), x),
    "index": lambda x: x[torch.arange(0, ROWS, 3, device=x.device)],
    "gather": lambda x: x.gather(1, x.argsort(1)),
    "cat": lambda x: torch.cat([x, x.t()]),
    "max_pool2d": lambda x: F.max_pool2d(image(x), 3, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(image(x), 3, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(image(x), 5),
    "interpolate": lambda x: F.interpolate(image(x), scale_factor=1.7, mode="bilinear"),
    "grid_sample": lambda x: F.grid_sample(image(x), weights(x, 4, 9, 9, 2).tanh()),
    "pixel_shuffle": lambda x: F.pixel_shuffle(image(x), 4),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "attention, math": attention(SDPBackend.MATH),
    "attention, efficient": attention(SDPBackend.EFFICIENT_ATTENTION),
    "attention, flash": attention(SDPBackend.FLASH_ATTENTION),
    "attention, cuDNN": attention(SDPBackend.CUDNN_ATTENTION),
}


def places(x: Tensor) -> Tensor:
    """Indices that repeat."""
    return torch.arange(x.numel(), device=x.device) % 97


KEPT: dict[str, Callable[[Tensor], Tensor | Sequence[Tensor]]] = {
    "index_add": lambda x: x.new_zeros(97).index_add(0, places(x), x.flatten()),
    "scatter_add": lambda x: x.new_zeros(97).scatter_add(0, places(x), x.flatten()),
    "scatter_reduce": lambda x: x.new_zeros(97).scatter_reduce(
        0, places(x), x.flatten(), "mean", include_self=False
    ),
    "index_put": lambda x: x.new_zeros(97).index_put(
        (places(x),), x.flatten(), accumulate=True
    ),
    "bincount": lambda x: places(x).bincount(x.flatten().double()),
    "cumsum": lambda x: x.flatten().repeat(40).cumsum(0),
    "cumprod": lambda x: x.flatten().sigmoid().cumprod(0),
    "logcumsumexp": lambda x: x.flatten().logcumsumexp(0),
    "nll_loss2d": lambda x: F.nll_loss(
        image(x), torch.ones(4, 32, 64, dtype=torch.long, device=x.device)
    ),
    "kthvalue": lambda x: x.round().kthvalue(7),
    "median": lambda x: x.round().median(-1),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _without_cudnn_on_the_dry_runtime():
    with torch.backends.cudnn.flags(enabled=not dry_cuda.is_loaded()):
        yield


def results(run: Callable[[Tensor], Tensor | Sequence[Tensor]], x: Tensor) -> list[Tensor]:
    found = run(x)
    return [found] if isinstance(found, Tensor) else list(found)


def on_another_thread(work: Callable[[], list[Tensor]]) -> list[Tensor]:
    """A thread has its own handles and workspaces of cuBLAS and cuDNN."""
    found: list[list[Tensor]] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def on_another_stream(work: Callable[[], list[Tensor]]) -> list[Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = work()
    torch.cuda.current_stream().wait_stream(stream)
    return found


def in_new_memory(work: Callable[[], list[Tensor]]) -> list[Tensor]:
    gc.collect()
    torch.cuda.empty_cache()
    taken = torch.empty(3 * MIB + 512, dtype=torch.uint8, device="cuda")
    found = work()
    del taken
    return found


WAYS = {
    "again": lambda work: work(),
    "in new memory": in_new_memory,
    "on another stream": on_another_stream,
    "on another thread": on_another_thread,
}


def differing(run: Callable[[Tensor], Tensor | Sequence[Tensor]], dtype: torch.dtype) -> list[str]:
    """The ways of a second run that give other bits. Skips if this GPU has no such kernel."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, ROWS, generator=generator).to("cuda", dtype)
    with torch.no_grad():
        try:
            first = results(run, x)
        except RuntimeError as error:
            if not re.search("No available kernel|not implemented for", str(error)):
                raise
            pytest.skip(str(error).splitlines()[0][:120])
        return [
            name
            for name, way in WAYS.items()
            if not all(map(torch.equal, way(lambda: results(run, x)), first))
        ]


HAS_NO_CPU_KERNEL = pytest.mark.not_dry("an operator without a kernel for CPUs")
WITHOUT_CPU_KERNEL = ("conv2d, grouped", "rms_norm")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=HAS_NO_CPU_KERNEL) if name in WITHOUT_CPU_KERNEL else name
        for name in REPEAT
    ],
)
def test_operator_that_ebb_recomputes_repeats_its_bits(name, dtype):
    assert differing(REPEAT[name], dtype) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KEPT)
def test_operator_that_ebb_keeps(name, dtype, record_property):
    """The figures show for which of these operators the rule is needed on this GPU."""
    found = [differing(KEPT[name], dtype) for _ in range(5)]

    record_property("differs", sorted({way for ways in found for way in ways}))
