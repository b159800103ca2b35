"""Compares plans and replays ahead with other tools, for a model of GPT-2's size on a GPU.

    python benchmarks/plans_on_gpu.py --output results
    EBB_BENCH_QUICK=1 python benchmarks/plans_on_gpu.py

Measures, for each way to run a step, its time and the peaks of allocated and of reserved memory;
for plans, also the prediction. Gradients are compared with eager's, bit for bit, except under
torch.compile, which uses other kernels. The exit status is 1 if any differ.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from environment import device, environment, keep, publish, quick
from language_model import GPT2, TINY, Llama, Shape, rotary_angles
from report import environment_line, table
from steps import equal
from systems import in_checkpoint, in_region, saved_on_cpu
from torch import Tensor
from workloads import Runner, run_directly

import ebb
from ebb._plan.choose.memory_budget import BudgetError

Row = dict[str, Any]
MIB = 1 << 20
SHARES = (0.8, 0.6, 0.4)  # of eager's peak above weights and optimizer
COMPILED_BUDGETS = (1.0, 0.6, 0.3)  # torch._functorch.config.activation_memory_budget


class Training:
    """A model, its optimizer and one batch."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        with device():
            self.model = Llama(shape).to(shape.dtype)
            self.tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1))
            angles = rotary_angles(shape)
        self.angles = angles.cos().to(shape.dtype), angles.sin().to(shape.dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)

    def loss(self, run: Runner = run_directly) -> Tensor:
        return self.model.loss(run, self.tokens, *self.angles)

    def step(self, loss: Callable[[], Tensor] | None = None) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        (loss or self.loss)().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def gradients(self) -> list[Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]


@dataclass(frozen=True)
class Way:
    """How to run a step.

    Attributes:
        loss: computes the loss; None: ``Training.loss``.
        during: makes the context in which the steps run.
        predicted: for a plan: milliseconds, and peak bytes above the memory before a step.
        exact: True if its gradients must have eager's bits.
    """

    loss: Callable[[], Tensor] | None = None
    during: Callable[[], AbstractContextManager[object]] = nullcontext
    predicted: tuple[float, int] | None = None
    exact: bool = True


@contextmanager
def ahead() -> Iterator[None]:
    with ebb.config.patch(ahead_regions=1, ahead_limit="4GiB"):
        yield


@contextmanager
def compiled_with(budget: float) -> Iterator[None]:
    import torch._functorch.config as config

    with config.patch(activation_memory_budget=budget):
        yield


def with_runner(
    run: Runner, during: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Callable[[Training], Way]:
    return lambda training: Way(lambda: training.loss(run), during)


def planned(share: float) -> Callable[[Training], Way]:
    """Plans for a share of eager's peak; if that is too small, for the lowest budget."""

    def make(training: Training) -> Way:
        try:
            plan = ebb.plan(training.model, training.step, share)
        except BudgetError as error:
            plan = ebb.plan(training.model, training.step, error.minimum)
        return Way(during=lambda: plan.apply(training.model), predicted=(plan.duration, plan.peak))

    return make


def compiled(budget: float) -> Callable[[Training], Way]:
    def make(training: Training) -> Way:
        torch.compiler.reset()
        loss = torch.compile(training.loss)
        return Way(loss, lambda: compiled_with(budget), exact=False)

    return make


RECOMPUTE_ALL = in_region(ebb.policies.recompute_all)
OFFLOAD_ALL = in_region(ebb.Policy(default=ebb.OFFLOAD, inputs=ebb.OFFLOAD))
WAYS: dict[str, Callable[[Training], Way]] = {
    "eager": lambda training: Way(),
    "AC": with_runner(in_checkpoint()),
    "ebb recompute_all": with_runner(RECOMPUTE_ALL),
    "ebb recompute_all, ahead": with_runner(RECOMPUTE_ALL, ahead),
    **{f"ebb plan, {share:.0%}": planned(share) for share in SHARES},
    **{f"torch.compile, activation budget {b}": compiled(b) for b in COMPILED_BUDGETS},
    "save_on_cpu": with_runner(saved_on_cpu),
    "ebb offload all": with_runner(OFFLOAD_ALL),
}


def synchronize() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def peaks(step: Callable[[], None]) -> Row:
    """Peak bytes of a step, above the memory in use before it; 0 on the CPU."""
    gc.collect()
    if device().type != "cuda":
        step()
        return {"allocated": 0, "requested": 0, "reserved": 0}
    synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    requested = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step()
    synchronize()
    return {
        "allocated": torch.cuda.max_memory_allocated() - before,
        # Without what the allocator adds to each request.
        "requested": torch.cuda.memory_stats()["requested_bytes.all.peak"] - requested,
        "reserved": torch.cuda.max_memory_reserved() - before,
    }


def milliseconds(step: Callable[[], None], seconds: float) -> float:
    """The median duration of a step."""
    times = []
    until = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < until:
        synchronize()
        begin = time.perf_counter()
        step()
        synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return sorted(times)[len(times) // 2]


def gradients_of(training: Training, way: Way) -> list[Tensor | None]:
    """Gradients of a step with deterministic kernels."""
    torch.use_deterministic_algorithms(device().type == "cuda")
    try:
        training.step(way.loss)
        return training.gradients()
    finally:
        torch.use_deterministic_algorithms(False)
        training.optimizer.zero_grad(set_to_none=True)


def measure(training: Training, way: Way, expected: list[Tensor | None], seconds: float) -> Row:
    """Measures one way. `expected`: eager's gradients; the first call, eager, fills it."""
    exact = None
    with way.during():
        if way.exact:
            found = gradients_of(training, way)
            expected += [] if expected else found
            exact = equal(found, expected)
            del found
        for _ in range(3):
            training.step(way.loss)
        row = {"milliseconds": milliseconds(lambda: training.step(way.loss), seconds)}
        row |= peaks(lambda: training.step(way.loss))
    if way.predicted:
        row["predicted_milliseconds"], row["predicted_allocated"] = way.predicted
    return row | {"exact": exact}


def measure_all(shape: Shape, seconds: float) -> Iterator[Row]:
    training = Training(shape)
    training.step()
    expected: list[Tensor | None] = []
    for name, make in WAYS.items():
        try:
            row = measure(training, make(training), expected, seconds)
        except Exception as error:  # unsupported, or out of memory: go on with the others
            row = {"failed": f"{type(error).__name__}: {error}"[:200]}
        training.optimizer.zero_grad(set_to_none=True)
        yield {"way": name} | row


def page(found: dict[str, Any]) -> str:
    rows = []
    eager = next((row["milliseconds"] for row in found["rows"] if "milliseconds" in row), 1.0)
    for row in found["rows"]:
        if "failed" in row:
            rows.append([row["way"], row["failed"].replace("|", " "), *[""] * 7])
            continue
        planned = "predicted_milliseconds" in row
        rows.append(
            [
                row["way"],
                f"{row['milliseconds']:.1f}",
                f"{row['milliseconds'] / eager:.3f}",
                f"{row['predicted_milliseconds']:.1f}" if planned else "",
                f"{row['requested'] / MIB:,.0f}",
                f"{row['allocated'] / MIB:,.0f}",
                f"{row['predicted_allocated'] / MIB:,.0f}" if planned else "",
                f"{row['reserved'] / MIB:,.0f}",
                {True: "yes", False: "**no**", None: "not compared"}[row["exact"]],
            ]
        )
    head = ["", "ms", "of eager", "predicted, ms", "requested", "allocated", "predicted"]
    head += ["reserved", "exact"]
    lines = [
        "# Plans on a GPU",
        "",
        f"{environment_line(found['environment'])}. Written by `benchmarks/plans_on_gpu.py`.",
        "",
        f"{found['model']}. Median time of a whole step; peaks of what is allocated and of what "
        "the allocator has reserved, MiB above weights, gradients and optimizer. A way that failed "
        "has its error.",
        "",
        table(head, rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder for the results; default: none")
    parser.add_argument("--seconds", type=float, default=4, help="for the steps of each way")
    parser.add_argument(
        "--small", action="store_true", help="a model whose kernels take less than their launches"
    )
    options = parser.parse_args()
    shape = TINY if quick() or options.small else GPT2
    rows: list[Row] = []
    found = {"environment": environment(), "model": shape.name, "rows": rows}
    for row in measure_all(shape, 0 if quick() else options.seconds):
        rows.append(row)
        print(row, flush=True)
        keep(found, options.output, "plans-on-gpu")
    publish(found, page(found), options.output, "plans-on-gpu")
    return int(any(row.get("exact") is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
