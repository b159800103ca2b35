"""Train a small byte-level GPT on Python's own source, plainly and under each of ebb's policies.

All variants start from the same weights and take turns: at each step every one of them sees the
same batch with the same dropout, and its loss, gradients and buffers must equal the plain ones
(identical). One more step of each gives the bytes alive between forward and backward (held) and the
most at any time (peak); time is the shortest step, as a multiple of the shortest plain one.

    python examples/train_gpt.py
    python examples/train_gpt.py --steps 200 --layers 8 --json figures.json

It runs on the CUDA device where there is one, else on the CPU: half a minute on two idle cores. The
exit status is 1 if anything differed from the plain run.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Read once, as torch loads: repeatable cuBLAS, no log lines from torch's profiler, and threads that
# sleep while they wait, since on a busy machine those that spin make a step ten times slower.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

import ebb

HEAD_DIM = 32
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then an MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp_in = nn.Linear(dim, 4 * dim, bias=False)
        self.mlp_out = nn.Linear(4 * dim, dim, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD_DIM))
        q, k, v = heads.transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.dropout(self.attention_out(mixed.flatten(-2)))
        change: Tensor = self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))
        return x + change


class GPT(nn.Module):
    """A GPT over bytes whose token embedding is its output layer as well."""

    positions: Tensor

    def __init__(self, dim: int, layers: int, length: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(256, dim)
        self.position_embedding = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.register_buffer("positions", torch.arange(length))
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.position_embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """The mean cross-entropy, in nats per byte, of predicting each byte from those before."""
        x = self.token_embedding(text[:, :-1]) + self.position_embedding(self.positions)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token_embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


@dataclass
class Variant:
    """One of the models that train side by side, and what was seen of it."""

    name: str
    model: GPT
    optimizer: torch.optim.Optimizer
    regions_ahead: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    first_difference: str | None = None


def whole(text: str, least: int = 1, multiple_of: int = 1) -> int:
    if text.isdecimal() and least <= int(text) < 2**31 and int(text) % multiple_of == 0:
        return int(text)
    expected = "a whole number" if multiple_of == 1 else f"a multiple of {multiple_of}"
    raise argparse.ArgumentTypeError(f"expected {expected}, {least} or more; got {text!r}")


def parser_of(description: str | None, steps: int, batch: int) -> argparse.ArgumentParser:
    """A parser for the sizes of a training, with these defaults."""
    width = functools.partial(whole, least=HEAD_DIM, multiple_of=HEAD_DIM)
    parser = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    parser.add_argument("--steps", type=whole, default=steps, help="training steps of each variant")
    parser.add_argument("--dim", type=width, default=128, help="model width, a multiple of 32")
    parser.add_argument("--layers", type=whole, default=4, help="transformer blocks")
    parser.add_argument("--batch", type=whole, default=batch, help="sequences in a batch")
    parser.add_argument("--length", type=whole, default=128, help="bytes in a sequence")
    return parser


def parse_arguments() -> argparse.Namespace:
    seed = functools.partial(whole, least=0)
    parser = parser_of(__doc__, steps=40, batch=8)
    parser.add_argument("--seed", type=seed, default=0, help="for weights, batches and dropout")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there too")
    arguments = parser.parse_args()
    if arguments.json is not None:
        try:
            arguments.json.open("a").close()
        except OSError as error:
            parser.error(f"argument --json: {error}")
    return arguments


def draw_batches(arguments: argparse.Namespace) -> list[Tensor]:
    """One batch a step, and one more, from the modules at the top of the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    choices = len(text) - arguments.length
    if choices < 1:
        sys.exit(f"--length {arguments.length} is too much: {folder}/*.py is {len(text)} bytes")
    generator = torch.Generator().manual_seed(arguments.seed)
    starts = torch.randint(choices, (arguments.steps + 1, arguments.batch, 1), generator=generator)
    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return list(corpus[starts + torch.arange(arguments.length + 1)].long().to(DEVICE))


def make_variants(arguments: argparse.Namespace) -> list[Variant]:
    """The plain model, then copies of it under torch's activation checkpointing and under ebb."""
    torch.manual_seed(arguments.seed)
    plain = GPT(arguments.dim, arguments.layers, arguments.length).to(DEVICE)
    models = {"plain": plain, "torch AC": copy.deepcopy(plain)}
    for block in models["torch AC"].blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    for name in (
        *("ebb recompute_all", "ebb recompute_all ahead"),
        *("ebb save_matmuls", "ebb torchtitan", "ebb save_all"),
    ):
        models[name] = copy.deepcopy(plain)
        ebb.apply(models[name], getattr(ebb.policies, name.split()[1]), modules="blocks.*")
    return [
        Variant(
            name,
            model,
            torch.optim.AdamW(model.parameters(), lr=2e-3),
            regions_ahead=1 if name.endswith(" ahead") else 0,
        )
        for name, model in models.items()
    ]


def train(variants: list[Variant], batches: list[Tensor], seed: int) -> None:
    """Train the variants in turns, so that they share whatever else the machine does."""
    for step, batch in enumerate(batches):
        expected: dict[str, Tensor] = {}
        for number, variant in enumerate(variants):
            started = now()
            seen = forward_and_backward(variant, batch, seed + step)
            seconds = now() - started
            expected = expected or seen  # the plain variant comes first
            name = find_difference(expected, seen)
            if name is not None and variant.first_difference is None:
                variant.first_difference = f"step {step}: {name}"
            started = now()
            variant.optimizer.step()
            variant.seconds.append(seconds + now() - started)
            variant.losses.append(seen["the loss"].item())
            show_progress(step + (number + 1) / len(variants), len(batches), variant)


def forward_and_backward(variant: Variant, batch: Tensor, seed: int) -> dict[str, Tensor]:
    """The loss, the gradients and the buffers, which stay as they are until the next call."""
    variant.optimizer.zero_grad()
    ebb.config.ahead.regions = variant.regions_ahead
    torch.manual_seed(seed)
    loss = variant.model(batch)
    loss.backward()
    tensors = {"the loss": loss.detach()}
    for name, parameter in variant.model.named_parameters():
        missing = parameter.new_empty(0)
        tensors[f"the gradient of {name}"] = missing if parameter.grad is None else parameter.grad
    return tensors | {f"the buffer {name}": b for name, b in variant.model.named_buffers()}


def find_difference(expected: dict[str, Tensor], seen: dict[str, Tensor]) -> str | None:
    """The first name whose tensors differ, or None."""
    return next((name for name in seen if not torch.equal(expected[name], seen[name])), None)


def now() -> float:
    """Seconds on a clock, read once the device has done all it was given."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def show_progress(done: float, steps: int, variant: Variant) -> None:
    """A bar on stderr where that is a terminal; elsewhere a line when a variant is done."""
    loss = f"loss {variant.losses[0]:.3f} -> {variant.losses[-1]:.3f}"
    if sys.stderr.isatty():
        bar = f"[{'#' * int(30 * done / steps):<30}] {int(done)}/{steps} {loss} {variant.name}"
        print(f"\r\x1b[K{bar if done < steps else ''}", end="", file=sys.stderr, flush=True)
    elif len(variant.losses) == steps:
        print(f"{variant.name}: {steps} steps, {loss}", file=sys.stderr)


def figures(variant: Variant, plain: Variant, batch: Tensor, seed: int) -> dict[str, Any]:
    """A row of the table; its bytes are those beyond what was alive before the step."""
    variant.optimizer.zero_grad()
    torch.manual_seed(seed)
    ebb.config.ahead.regions = variant.regions_ahead
    if DEVICE.type == "cuda":
        held, peak = measure_cuda_step(variant.model, batch)
    elif variant.regions_ahead:
        # The profiler does not see the thread that replays ahead, so it must not see the backward
        # that frees that thread's memory. The thread adds at most `most_bytes` to the peak.
        held = measure_cpu_forward(variant.model, batch)
        ebb.config.ahead.regions = 0
        peak = measure_cpu_step(variant.model, batch)[1] + ebb.stats()["ahead"]["most_bytes"]
    else:
        held, peak = measure_cpu_step(variant.model, batch)
    return {
        "policy": variant.name,
        "held_bytes": held,
        "peak_bytes": peak,
        "time_ratio": min(variant.seconds) / min(plain.seconds),
        "first_loss": variant.losses[0],
        "final_loss": variant.losses[-1],
        "identical": variant.first_difference is None,
        "first_difference": variant.first_difference,
    }


def measure_cuda_step(model: GPT, batch: Tensor) -> tuple[int, int]:
    """Bytes alive between forward and backward, and at most."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = model(batch)
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    return held, torch.cuda.max_memory_allocated() - before


def measure_cpu_step(model: GPT, batch: Tensor) -> tuple[int, int]:
    """The same, from the profiler's record of each allocation (positive) and release (negative)."""
    boundary = "train_gpt: forward is done"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = model(batch)
        with record_function(boundary):
            loss.backward()
        # A release counts only if it is seen: all that was allocated here goes before the end.
        del loss
        model.zero_grad()
    alive = held = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == boundary:
            held = alive
        elif event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return held, peak


def measure_cpu_forward(model: GPT, batch: Tensor) -> int:
    """Bytes alive between forward and backward."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = model(batch)
    loss.backward()
    model.zero_grad()
    events = profiler.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{'policy':<23} {'held MiB':>9} {'peak MiB':>9} {'time':>6} {'loss':>7}  identical")
    for row in rows:
        held, peak = row["held_bytes"] / 2**20, row["peak_bytes"] / 2**20
        numbers = f"{held:9.1f} {peak:9.1f} {row['time_ratio']:5.2f}x {row['final_loss']:7.4f}"
        identical = "yes" if row["identical"] else f"NO, first at {row['first_difference']}"
        print(f"{row['policy']:<23} {numbers}  {identical}")


def main() -> int:
    arguments = parse_arguments()
    # Plain PyTorch must agree with itself before anything can be compared with it.
    torch.use_deterministic_algorithms(DEVICE.type == "cuda")
    *batches, last_batch = draw_batches(arguments)
    variants = make_variants(arguments)
    train(variants, batches, arguments.seed)
    rows = [figures(variant, variants[0], last_batch, arguments.seed) for variant in variants]

    print_table(rows)
    if arguments.json is not None:
        setup = {"device": str(DEVICE), "torch": torch.__version__, "ebb": ebb.__version__}
        arguments.json.write_text(json.dumps({**setup, "rows": rows}, indent=2) + "\n")
    return 0 if all(row["identical"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
