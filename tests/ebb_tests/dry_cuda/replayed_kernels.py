"""Compares the kernels of replays with those of the forward: ``python replayed_kernels.py``.

Needs the variable DRY_CUDA_LOG. Runs torch's operators (``op_db``) under ``recompute_all`` and
prints in JSON: how many samples were compared, and for each operator whose replay launches kernels
that its forward did not, these launches. A replay may launch fewer: it runs only what is needed.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

import ebb
from ebb_tests import dry_cuda

SAMPLES = 3
# Kernels that torch compiles at run time, and libraries that the runtime does not stand in for, end
# the process. Names that begin like these are left out.
COMPILED_AT_RUN_TIME = (
    *("i0", "mvlgamma", "sinc", "exp2", "polygamma", "digamma", "lgamma", "special", "erfc"),
    *("erfinv", "gcd", "lcm", "prod", "masked.prod"),
)
OF_LIBRARIES = (
    *("sparse", "linalg", "cholesky", "svd", "qr", "lu", "geqrf", "ormqr", "triangular"),
    *("logdet", "pinverse", "matrix_exp", "nn.functional.ctc"),
)


class Log:
    """What the runtime has written since the last call of `take`."""

    def __init__(self) -> None:
        self._file = open(os.environ["DRY_CUDA_LOG"])  # noqa: SIM115

    def take(self) -> list[str]:
        """Kernels with grid, block and shared memory, and copies with their bytes."""
        dry_cuda.mark("taken")
        lines = [line.split(maxsplit=3) for line in self._file.read().splitlines()]
        return [f"{kind} {what[-1]}" for kind, *what in lines if kind in "KC"]


class Keep(torch.autograd.Function):
    """Saves tensors; its backward unpacks them and notes what that launches."""

    @staticmethod
    def forward(ctx, log, replayed, *tensors):
        ctx.log, ctx.replayed = log, replayed
        ctx.save_for_backward(*tensors)
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.take()
        _ = ctx.saved_tensors
        ctx.replayed += ctx.log.take()
        return None, None, *(None for _ in ctx.needs_input_grad[2:])


def outputs_of(function, sample) -> list[Tensor]:
    result = function(sample.input, *sample.args, **sample.kwargs)
    return [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point()]


def compare(function, sample, log: Log) -> tuple[list[str], list[str]] | None:
    """Launches of the forward and of the replay. None: nothing was replayed."""
    outputs_of(function, sample)  # the first call may set up lasting memory
    before = ebb.stats()["total"]["ops_replayed"]
    replayed: list[str] = []
    with ebb.region(ebb.policies.recompute_all):
        log.take()
        outputs = outputs_of(function, sample)
        launched = log.take()
        if not any(t.requires_grad for t in outputs):
            return None
        kept = Keep.apply(log, replayed, *outputs)
        del outputs
    kept.backward()
    if ebb.stats()["total"]["ops_replayed"] == before:
        return None
    return launched, replayed


def samples() -> Iterator[tuple[str, object, object]]:
    for op in op_db:
        if torch.float32 not in op.supported_dtypes("cuda") or not op.supports_autograd:
            continue
        if op.name.startswith((*COMPILED_AT_RUN_TIME, *OF_LIBRARIES)):
            continue
        made = op.sample_inputs("cuda", torch.float32, requires_grad=True)
        try:
            for sample in itertools.islice(made, SAMPLES):
                yield op.formatted_name, op, sample
        except Exception:  # the samples need results of kernels
            continue


@torch.backends.cudnn.flags(enabled=False)
def main() -> None:
    warnings.simplefilter("ignore")
    log, compared, different = Log(), 0, {}
    for name, op, sample in samples():
        try:
            found = compare(op, sample, log)
        except Exception as error:  # eager needs results of kernels, or a library
            print(f"{name}: {type(error).__name__}", file=sys.stderr)
            continue
        if found is not None:
            compared += 1
            if more := Counter(found[1]) - Counter(found[0]):
                different.setdefault(name, sorted(more.elements()))
    print(json.dumps({"compared": compared, "different": different}))


if __name__ == "__main__":
    main()
