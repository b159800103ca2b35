"""The systems that are compared, each with the fastest settings that its users could choose.

torch.utils.checkpoint runs without preserving the random state and without comparing shapes. No
workload here needs these checks, and torch-remat has neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from workloads import Block, Runner, Workload, run_directly

import ebb

NOTHING = "nothing recomputed"
RECOMPUTE_ALL = "recompute all"
RECOMPUTE_ALL_AHEAD = "recompute all but the last block"
TORCHTITAN = "torchtitan"
MATMULS_SAVED = "matmuls saved"
EVERYTHING_SAVED = "everything saved"
OFFLOADED = "offloaded"


@dataclass(frozen=True)
class System:
    """A way to run a block.

    Attributes:
        name: shown in the results.
        family: the values that the system saves; one family should hold the same bytes.
        run: runs a block.
        during: makes the context in which a step runs; entering it is not timed.
    """

    name: str
    family: str
    run: Runner
    during: Callable[[], AbstractContextManager[None]] = nullcontext

    def step(self, workload: Workload) -> None:
        with self.during():
            workload.step(self.run)


def operators(*patterns: str) -> set[Any]:
    """All overloads of the aten operators with these names, or with this prefix (`name*`)."""
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and any(
            base == p or (p.endswith("*") and base.startswith(p[:-1])) for p in patterns
        ):
            found.add(getattr(getattr(torch.ops.aten, base), overload or "default"))
    return found


def matmuls() -> set[Any]:
    """The operators whose results `ebb.policies.save_matmuls` saves."""
    return operators(
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_grouped_mm",
        "convolution",
        "_scaled_dot_product_*",
    )


def matmuls_contexts() -> Callable[[], Any]:
    saved = matmuls()

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in saved:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, decide)


def torchtitan_contexts() -> Callable[[], Any]:
    """torchtitan's policy for SAC: attention is saved, and every second `mm`, from the first."""
    attention = operators(
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    saved = attention | {torch.ops.aten.linear.default, torch.ops.aten.max.default}
    mm = torch.ops.aten.mm.default

    def contexts() -> Any:
        calls = {False: 0, True: 0}  # count of `mm` calls; key: True in a recomputation

        def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op is mm:
                calls[context.is_recompute] += 1
                if calls[context.is_recompute] % 2:
                    return CheckpointPolicy.MUST_SAVE
            elif op in saved:
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(decide)  # type: ignore[no-untyped-call]

    return contexts


def in_checkpoint(reentrant: bool = False, context_fn: Callable[[], Any] | None = None) -> Runner:
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
    if not reentrant:
        options["determinism_check"] = "none"
    return functools.partial(
        checkpoint, use_reentrant=reentrant, preserve_rng_state=False, **options
    )


def in_region(policy: ebb.Policy) -> Runner:
    def run(block: Block, *inputs: Tensor) -> Tensor:
        with ebb.region(policy):
            return block(*inputs)

    return run


@contextmanager
def replays_ahead() -> Iterator[None]:
    """Enables replays ahead of one region. They run only while a core is idle."""
    ebb.config.ahead.regions = 1
    try:
        yield
    finally:
        ebb.config.ahead.regions = 0


EAGER = System("eager", NOTHING, run_directly)


def ebb_systems() -> list[System]:
    recompute_all = in_region(ebb.policies.recompute_all)
    return [
        System("ebb recompute_all", RECOMPUTE_ALL, recompute_all),
        System("ebb recompute_all, ahead", RECOMPUTE_ALL_AHEAD, recompute_all, replays_ahead),
        System("ebb torchtitan", TORCHTITAN, in_region(ebb.policies.torchtitan)),
        System("ebb save_matmuls", MATMULS_SAVED, in_region(ebb.policies.save_matmuls)),
        System("ebb save_all", EVERYTHING_SAVED, in_region(ebb.policies.save_all)),
    ]


def torch_systems() -> list[System]:
    return [
        System("AC, reentrant", RECOMPUTE_ALL, in_checkpoint(reentrant=True)),
        System("AC", RECOMPUTE_ALL, in_checkpoint()),
        System("SAC torchtitan", TORCHTITAN, in_checkpoint(context_fn=torchtitan_contexts())),
        System("SAC matmuls", MATMULS_SAVED, in_checkpoint(context_fn=matmuls_contexts())),
    ]


def remat_systems() -> list[System]:
    """Systems with torch-remat; empty if it is not installed."""
    try:
        from remat import Remat
    except ModuleNotFoundError:
        print("torch-remat is not installed, so it is left out: pip install -e '.[bench]'")
        return []
    return [
        System("torch-remat recompute all", RECOMPUTE_ALL, Remat(lambda *_: False)),
        System(
            "torch-remat torchtitan",
            TORCHTITAN,
            Remat(
                lambda operator, number: (
                    number % 2 == 0 if operator == "mm" else operator == "attention" and CUDA
                )
            ),
        ),
        System("torch-remat matmuls", MATMULS_SAVED, Remat(lambda *_: True)),
    ]


# torchtitan's list names the attention kernels for CUDA, not the one for the CPU.
CUDA = torch.cuda.is_available()


def offload_systems() -> list[System]:
    """Systems that offload the tensors that autograd saves to host memory."""
    policies = {
        "ebb offload_inputs": ebb.policies.offload_inputs,
        "ebb offload all": ebb.Policy(default=ebb.OFFLOAD, inputs=ebb.OFFLOAD),
    }
    ours = [System(name, OFFLOADED, in_region(policy)) for name, policy in policies.items()]
    return [System("save_on_cpu", OFFLOADED, saved_on_cpu), *ours]


def saved_on_cpu(block: Block, *inputs: Tensor) -> Tensor:
    with save_on_cpu(pin_memory=CUDA):
        return block(*inputs)


def all_systems() -> list[System]:
    """Every system that is installed, eager first."""
    return [EAGER, *torch_systems(), *remat_systems(), *ebb_systems()]
