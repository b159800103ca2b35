"""A job that trains a small network, written without regard to ebb."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 32
ROWS = 512
DEPTH = 6
CHANGE = 14  # the step at which some jobs change


def add_bits(digest: Any, tensors: Iterable[Tensor | None]) -> None:
    """Adds the tensors' bytes to a digest. Does not allocate tensors: NumPy makes any copies."""
    for tensor in tensors:
        if tensor is None:
            digest.update(b"none")
            continue
        flat = tensor.detach()
        flat = flat.view(torch.int16) if flat.dtype is torch.bfloat16 else flat
        digest.update(np.ascontiguousarray(flat.numpy()))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return y


class Net(nn.Module):
    """A stack of blocks and a head.

    Args:
        depth: number of blocks.
        block: makes a block.
        call: calls a block with an input; default: ``block(x)``.
    """

    def __init__(
        self,
        depth: int = DEPTH,
        block: Callable[[], nn.Module] = Block,
        call: Callable[[nn.Module, Any], Any] | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)
        self.call = call

    def forward(self, x: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.call is None else self.call(layer, x)
        y: Tensor = self.head(x)
        return y


class Job:
    """A job that trains one model. Subclasses change parts of it.

    Attributes:
        steps: number of steps.
        bits: for each step, digests of losses, gradients, parameters, buffers and random state.
        expected: "plan": ebb makes a plan; "none": ebb prints one line with the reason; "silent":
            no plan and no line; "any": a plan or a line.
        saves_less_itself: True if the job saves less than eager by its own checkpointing or hooks.
            The bytes of a budget such as 40% are then not checked.
    """

    steps = 20
    expected = "plan"
    saves_less_itself = False

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.bits: list[dict[str, str]] = []
        self._digests: dict[str, Any] = defaultdict(hashlib.sha1)
        self.model: nn.Module = self.build()
        self.optimizer: torch.optim.Optimizer = self.optimizer_of(self.model)

    def build(self) -> nn.Module:
        return Net()

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def models(self) -> list[nn.Module]:
        """The models that the job trains."""
        return [one for one in vars(self).values() if isinstance(one, nn.Module)]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [one for one in vars(self).values() if isinstance(one, torch.optim.Optimizer)]

    def rows(self, step: int) -> int:
        return ROWS

    def batch(self, step: int) -> Any:
        return torch.randn(self.rows(step), WIDTH)

    def loss(self, step: int) -> Tensor:
        return self.model(self.batch(step)).square().mean()  # type: ignore[no-any-return]

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(step)
        loss.backward()  # type: ignore[no-untyped-call]
        self.note(loss)
        self.optimizer.step()

    def note(self, *losses: Tensor) -> None:
        """Adds losses and the present gradients to the digests."""
        add_bits(self._digests["losses"], losses)
        gradients = (p.grad for model in self.models() for p in model.parameters())
        add_bits(self._digests["gradients"], gradients)

    def close(self) -> None:
        """Called after training."""

    def train(self) -> Iterator[int]:
        for step in range(self.steps):
            self.step(step)
            for model in self.models():
                add_bits(self._digests["parameters"], model.parameters())
                add_bits(self._digests["buffers"], model.buffers())
            yield step
            add_bits(self._digests["random state"], [torch.get_rng_state()])
            self.bits.append({what: one.hexdigest() for what, one in self._digests.items()})
            self._digests.clear()


KINDS: dict[str, type[Job]] = {}


def kind(name: str) -> Callable[[type[Job]], type[Job]]:
    def put(job: type[Job]) -> type[Job]:
        KINDS[name] = job
        return job

    return put
