"""A backend that is registered when ebb has been used already."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import ebb
from ebb_tests import TESTS
from ebb_tests import device as late
from ebb_tests.exactness import run_process

SINES = ebb.Policy({"aten::sin": ebb.OFFLOAD})
LEFT = []  # an input, and what a region made of it before there was a backend


@pytest.fixture(autouse=True, scope="module")
def _ebb_was_used_before(tmp_path_factory):
    """Regions and the disk tier. No backward: torch's own counts the devices at the first one."""
    assert torch._C._get_privateuse1_backend_name() != "late"
    ebb.config.update(offload_disk=str(tmp_path_factory.mktemp("disk")), offload_min_bytes=1)
    x = torch.randn(1024, requires_grad=True)
    with ebb.region(SINES):
        LEFT.extend([x, x.sin().cos()])
    assert ebb.stats()["offload"]["disk_bytes_used"] > 0
    late.load()


def test_tensor_on_disk_from_before_the_backend_comes_back():
    x, y = LEFT

    found = torch.autograd.grad(y.sum(), x)[0]

    expected = torch.autograd.grad(x.sin().cos().sum(), x)[0]
    assert torch.equal(found, expected)


def test_tensors_of_the_new_backend_are_offloaded(device):
    before = ebb.stats()["offload"]["bytes_sent"]
    x = torch.randn(1024).to(device).requires_grad_()
    with ebb.region(SINES):
        y = x.sin().cos()
    sent = ebb.stats()["offload"]["bytes_sent"] - before
    found = torch.autograd.grad(y.sum(), x)[0]

    cpu = x.detach().cpu().requires_grad_()
    assert sent == 4096
    assert torch.equal(found.cpu(), torch.autograd.grad(cpu.sin().cos().sum(), cpu)[0])


def test_kernels_of_the_new_backend_run_in_a_region(device):
    """mish_backward decomposes, but this device has a kernel of its own, which gives other bits."""
    x = torch.randn(4, 4).to(device).requires_grad_()

    def gradient():
        y = F.mish(x)
        return torch.autograd.grad(y.sum(), x)[0].cpu()

    expected = gradient()
    with ebb.region():
        found = gradient()

    assert torch.equal(expected, (3 * x.detach()).cpu())
    assert torch.equal(found, expected)


MATMUL = torch.backends.cuda.matmul
PRECISIONS = {  # how to get and to set it, and another value than the usual one
    **{
        name: (
            lambda name=name: getattr(MATMUL, name),
            lambda v, name=name: setattr(MATMUL, name, v),
            [False, True],
        )
        for name in (
            "allow_bf16_reduced_precision_reduction",
            "allow_fp16_reduced_precision_reduction",
            "allow_fp16_accumulation",
        )
    },
    "sm_carveout": (
        torch._C._get_sm_carveout_experimental,
        torch._C._set_sm_carveout_experimental,
        [None, 8],
    ),
    "float32": (
        lambda: MATMUL.fp32_precision,
        lambda v: setattr(MATMUL, "fp32_precision", v),
        ["ieee", "tf32"],
    ),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_precision_changed_between_forward_and_backward_raises(device, name):
    get, put, values = PRECISIONS[name]
    w = torch.randn(8, 8).to(device).requires_grad_()
    before = get()
    put(values[0])
    with ebb.region(name="block"):
        loss = (w @ w).exp().sin().sum()
    try:
        put(values[1])
        with pytest.raises(RuntimeError, match=r"aten::mm.default in region 'block'.*precision"):
            loss.backward()
        put(values[0])
        loss.backward()
    finally:
        put(before)


NOT_OFFLOADED_YET = """
import torch, ebb
from ebb_tests import device as late
late.load()
torch.ops.late.counts()
ebb.stats()
print(torch.ops.late.counts().get("device count", 0))
"""


def test_statistics_before_any_offload_ask_for_no_device():
    """To ask for CUDA's devices starts the driver, and then the process cannot fork workers."""
    assert run_process(["-c", NOT_OFFLOADED_YET], PYTHONPATH=str(TESTS)) == "0\n"
