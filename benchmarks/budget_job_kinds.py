"""Training loops of many kinds, written without regard to ebb, for `budgets_in_jobs.py`."""

from __future__ import annotations

import copy
import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 32
ROWS = 512
DEPTH = 6
CHANGE = 14  # the step at which jobs that change do so


def add_bits(digest: Any, tensors: Iterable[Tensor | None]) -> None:
    """Takes no memory of torch's: copies, where there must be some, are NumPy's."""
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
    """Blocks and a head.

    Args:
        depth, block: how many blocks, and what makes one.
        call: how one is called; default: by its input.
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
    """A training of one model; subclasses say what is different.

    Attributes:
        steps: how many there are.
        bits: of each step: digests of losses, gradients, parameters, buffers and random state.
        expected: "plan", "none" (one line says why there is no plan), "silent" (no line does), or
            "any".
        saves_less_itself: by checkpointing or hooks of its own, which a share does not count.
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
        """Those that train."""
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
        """Losses, and the gradients that are there."""
        add_bits(self._digests["losses"], losses)
        gradients = (p.grad for model in self.models() for p in model.parameters())
        add_bits(self._digests["gradients"], gradients)

    def close(self) -> None:
        """After training."""

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


@kind("plain")
class Plain(Job):
    pass


@kind("accumulation")
class Accumulating(Job):
    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        for _ in range(3):
            loss = self.loss(step)
            loss.backward()
            self.note(loss)
            del loss
        self.optimizer.step()


@kind("gradient scaler")
class Scaled(Job):
    """Autocast, and a scaler that skips some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.loss(step)
        self.scaler.scale(loss).backward()
        if step in (0, 1, 4, 11):
            self.model.head.bias.grad.fill_(torch.inf)
        self.note(loss)
        self.scaler.step(self.optimizer)
        self.scaler.update()


@kind("closures, LBFGS")
class Closures(Job):
    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=3)

    def step(self, step: int) -> None:
        x = self.batch(step)

        def closure() -> float:
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            self.note(loss)
            return float(loss)

        self.optimizer.step(closure)


@kind("clip by norm")
class Clipped(Job):
    def note(self, *losses: Tensor) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        super().note(*losses)


@kind("EMA copy")
class Averaged(Job):
    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.model).requires_grad_(False)

    def step(self, step: int) -> None:
        super().step(step)
        with torch.no_grad():
            pairs = zip(self.average.parameters(), self.model.parameters(), strict=True)
            for mean, now in pairs:
                mean.lerp_(now, 0.1)
            self.average.eval()
            self.average(torch.ones(4, WIDTH))


@kind("GAN")
class Gan(Job):
    critic_steps = 1

    def __init__(self) -> None:
        super().__init__()
        self.critic = Net(4)
        self.of_critic = torch.optim.SGD(self.critic.parameters(), lr=0.01)

    def step(self, step: int) -> None:
        for _ in range(self.critic_steps):
            self.of_critic.zero_grad()
            fake = torch.randn(ROWS, WIDTH) * self.model(self.batch(step)).detach()
            loss = self.critic(fake).mean() - self.critic(self.batch(step)).mean()
            loss.backward()
            self.note(loss)
            self.of_critic.step()
            del loss, fake
        self.optimizer.zero_grad()
        loss = -self.critic(torch.randn(ROWS, WIDTH) * self.model(self.batch(step))).mean()
        loss.backward()
        self.note(loss)
        self.optimizer.step()


@kind("WGAN, 5 critic steps")
class Wasserstein(Gan):
    critic_steps = 5


@kind("two models in turn")
class Alternating(Job):
    steps = 32

    def __init__(self) -> None:
        super().__init__()
        self.other = Net(5)
        self.of_other = torch.optim.SGD(self.other.parameters(), lr=0.01)

    def step(self, step: int) -> None:
        model, optimizer = (self.model, self.optimizer) if step % 2 else (self.other, self.of_other)
        optimizer.zero_grad()
        loss = model(self.batch(step)).square().mean()
        loss.backward()
        self.note(loss)
        optimizer.step()


@kind("evaluation between")
class Evaluating(Job):
    def step(self, step: int) -> None:
        super().step(step)
        if step % 4 == 3:
            self.model.eval()
            with torch.no_grad():
                self.model(self.batch(step))
            self.model.train()


@kind("evaluation with gradients on")
class EvaluatingWithGradients(Job):
    """A forward for a validation loss whose graph is dropped."""

    def step(self, step: int) -> None:
        super().step(step)
        if step % 4 == 3:
            self.model.eval()
            self.note(self.loss(step))
            self.model.train()


@kind("generation")
class Generating(Job):
    def step(self, step: int) -> None:
        with torch.no_grad():
            for _ in range(1 + step * 7 % 5):
                self.model(torch.ones(2, WIDTH))
        super().step(step)


@kind("frozen, then not")
class Thawed(Job):
    steps = 32

    def step(self, step: int) -> None:
        if step in (0, CHANGE):
            self.model.layers[:4].requires_grad_(step > 0)
        super().step(step)


@kind("all frozen, then not")
class AllThawed(Job):
    steps = 32

    def step(self, step: int) -> None:
        if step in (0, CHANGE):
            self.model.layers.requires_grad_(step > 0)
        super().step(step)


@kind("unfrozen gradually")
class Gradually(Job):
    steps = 44

    def step(self, step: int) -> None:
        if step == 0:
            self.model.layers[:5].requires_grad_(False)
        if step % 7 == 6 and step < 35:
            self.model.layers[4 - step // 7].requires_grad_(True)
        super().step(step)


@kind("growing batch")
class Growing(Job):
    steps = 40

    def rows(self, step: int) -> int:
        return ROWS if step < CHANGE else ROWS + ROWS // 2


@kind("batch that grows each step")
class GrowingAlways(Job):
    steps = 48

    def rows(self, step: int) -> int:
        return ROWS // 2 + 16 * step


@kind("shrinking batch")
class Shrinking(Job):
    steps = 60

    def rows(self, step: int) -> int:
        return ROWS if step < CHANGE else ROWS // 3


@kind("batch by keyword")
class ByKeyword(Growing):
    def build(self) -> nn.Module:
        return Net(call=lambda layer, x: layer(x=x))


class Nested(Block):
    def forward(self, inputs: Any) -> Any:
        return {"pair": (super().forward(inputs["pair"][0]), inputs["pair"][1])}


class NetOfNested(Net):
    def __init__(self) -> None:
        super().__init__(block=Nested)

    def forward(self, x: Any) -> Tensor:
        x = {"pair": (x, None)}
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x["pair"][0])
        return y


@kind("tuples and dicts")
class InTuples(Growing):
    def build(self) -> nn.Module:
        return NetOfNested()


class Crossing(Block):
    """Reads a second argument."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + torch.softmax(x @ memory.T, -1) @ memory)


class WithMemory(Net):
    def __init__(self) -> None:
        super().__init__(block=Crossing)

    def forward(self, x: Any) -> Tensor:
        x, memory = x[:ROWS], x[ROWS // 2 :]
        for layer in self.layers:
            x = layer(x, memory)
        y: Tensor = self.head(x)
        return y


@kind("second argument that grows")
class GrowingMemory(Job):
    steps = 40

    def build(self) -> nn.Module:
        return WithMemory()

    def rows(self, step: int) -> int:
        return ROWS if step < CHANGE else 2 * ROWS


class Attending(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.softmax(x @ x.transpose(-1, -2), -1) @ x)


@kind("other shapes of equal size")
class Reshaped(Job):
    steps = 40

    def build(self) -> nn.Module:
        return Net(block=Attending)

    def batch(self, step: int) -> Any:
        return torch.randn(*((16, 32) if step < CHANGE else (2, 256)), WIDTH)


@kind("autocast, then not")
class Precise(Job):
    steps = 40

    def loss(self, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=step < CHANGE):
            return super().loss(step).float()


@kind("gradient penalty each 8th")
class Penalized(Job):
    steps = 48

    def loss(self, step: int) -> Tensor:
        x = self.batch(step)
        if step % 8 != 7:
            return self.model(x).square().mean()  # type: ignore[no-any-return]
        x.requires_grad_()
        y = self.model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + slope.square().mean()  # type: ignore[no-any-return]


@kind("larger step each 8th")
class Recurring(Job):
    steps = 48

    def rows(self, step: int) -> int:
        return ROWS + ROWS // 2 if step % 8 == 7 else ROWS


@kind("functional_call")
class Functional(Job):
    def loss(self, step: int) -> Tensor:
        values = {name: p * 1.0 for name, p in self.model.named_parameters()}
        y = torch.func.functional_call(self.model, values, (self.batch(step),))
        return y.square().mean()  # type: ignore[no-any-return]


@kind("torch.func.grad")
class Transformed(Job):
    expected = "any"

    def build(self) -> nn.Module:
        return Net(block=lambda: Block(dropout=0.0))

    def step(self, step: int) -> None:
        x = self.batch(step)

        def loss_of(values: dict[str, Tensor]) -> Tensor:
            y = torch.func.functional_call(self.model, values, (x,))
            return y.square().mean()  # type: ignore[no-any-return]

        values = {name: p.detach() for name, p in self.model.named_parameters()}
        gradients, loss = torch.func.grad_and_value(loss_of)(values)
        for name, p in self.model.named_parameters():
            p.grad = gradients[name]
        self.note(loss)
        self.optimizer.step()


@kind("autograd.grad")
class Asked(Job):
    def step(self, step: int) -> None:
        loss = self.loss(step)
        parameters = list(self.model.parameters())
        for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = grad
        self.note(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()


@kind("hooks on modules")
class Hooked(Job):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        for layer in self.model.layers:
            layer.register_forward_hook(lambda _m, _x, y: y * 1.01)
            layer.up.register_forward_pre_hook(lambda _m, x: (x[0] + 0.01,))
            layer.register_full_backward_hook(
                lambda _m, _gx, gy: self.seen.append(float(gy[0].sum()))
            )

    def note(self, *losses: Tensor) -> None:
        super().note(*losses)
        self._digests["losses"].update(repr(self.seen).encode())
        self.seen.clear()


@kind("hooks on gradients")
class GradientHooked(Job):
    def __init__(self) -> None:
        super().__init__()
        for p in self.model.parameters():
            p.register_hook(lambda grad: grad * 0.5)

    def loss(self, step: int) -> Tensor:
        y = self.model(self.batch(step))
        y.register_hook(lambda grad: grad.clamp(-1, 1))
        return y.square().mean()  # type: ignore[no-any-return]


@kind("tied weights")
class Tied(Job):
    def build(self) -> nn.Module:
        net = Net()
        for layer in net.layers[1:]:
            layer.up.weight = net.layers[0].up.weight
        return net


@kind("a layer used twice")
class Shared(Job):
    def build(self) -> nn.Module:
        net = Net(3)
        net.layers.extend(net.layers[:3])
        return net


class Routing(Block):
    """Rows go to one of three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if len(rows):
                y = F.gelu(expert(x[rows])) * weight[rows, None]
                mixed = mixed.index_add(0, rows, y)
        return super().forward(x + mixed)


@kind("varying routes")
class Routed(Job):
    steps = 32

    def build(self) -> nn.Module:
        return Net(block=Routing)

    def batch(self, step: int) -> Any:
        return torch.randn(ROWS, WIDTH) + torch.randn(WIDTH)


@kind("lengths in buckets")
class Bucketed(Job):
    steps = 48

    def build(self) -> nn.Module:
        return Net(block=Attending)

    def batch(self, step: int) -> Any:
        return torch.randn(8, (32, 64, 96, 128)[step * 5 % 7 % 4], WIDTH)


@kind("gradients of zeros")
class Zeroed(Job):
    def step(self, step: int) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.loss(step)
        loss.backward()
        self.note(loss)
        self.optimizer.step()


@kind("zero_grad after the step")
class ZeroedAfter(Job):
    def step(self, step: int) -> None:
        loss = self.loss(step)
        loss.backward()
        self.note(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()


@kind("optimizer in backward")
class InBackward(Job):
    expected = "none"

    def __init__(self) -> None:
        super().__init__()
        self.all = {p: torch.optim.SGD([p], lr=0.01) for p in self.model.parameters()}
        self.handles = [
            p.register_post_accumulate_grad_hook(lambda p, own=own: self.one_step(p, own))
            for p, own in self.all.items()
        ]

    def close(self) -> None:
        for handle in self.handles:  # the garbage collector does not see them
            handle.remove()

    def one_step(self, p: Tensor, own: torch.optim.Optimizer) -> None:
        add_bits(self._digests["gradients"], [p.grad])
        own.step()
        own.zero_grad()

    def step(self, step: int) -> None:
        loss = self.loss(step)
        loss.backward()
        self.note(loss)


@kind("two optimizers in a step")
class TwoOptimizers(Job):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.model.layers.parameters(), lr=1e-3)
        self.second = torch.optim.SGD(self.model.head.parameters(), lr=1e-2)

    def step(self, step: int) -> None:
        self.second.zero_grad()
        super().step(step)
        self.second.step()


@kind("no optimizer")
class ByHand(Job):
    expected = "silent"

    def step(self, step: int) -> None:
        loss = self.loss(step)
        loss.backward()
        self.note(loss)
        with torch.no_grad():
            for p in self.model.parameters():
                p -= 0.01 * p.grad
                p.grad = None


@kind("SWA")
class Swa(Job):
    def __init__(self) -> None:
        super().__init__()
        self.average = torch.optim.swa_utils.AveragedModel(self.model)

    def step(self, step: int) -> None:
        super().step(step)
        if step % 4 == 3:
            self.average.update_parameters(self.model)


@kind("SAM")
class Sharpness(Job):
    """Two forwards and backwards in a step, the second with moved weights."""

    def step(self, step: int) -> None:
        x = self.batch(step)
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.note(loss)
        with torch.no_grad():
            moves = [0.01 * p.grad for p in self.model.parameters()]
            for p, move in zip(self.model.parameters(), moves, strict=True):
                p += move
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.note(loss)
        with torch.no_grad():
            for p, move in zip(self.model.parameters(), moves, strict=True):
                p -= move
        self.optimizer.step()


@kind("MAML")
class Maml(Job):
    def build(self) -> nn.Module:
        return Net(4)

    def loss(self, step: int) -> Tensor:
        values = dict(self.model.named_parameters())
        for _ in range(2):
            inner = torch.func.functional_call(self.model, values, (self.batch(step)[:128],))
            slopes = torch.autograd.grad(
                inner.square().mean(), tuple(values.values()), create_graph=True
            )
            pairs = zip(values.items(), slopes, strict=True)
            values = {name: value - 0.01 * slope for (name, value), slope in pairs}
        y = torch.func.functional_call(self.model, values, (self.batch(step)[:256],))
        return y.square().mean()  # type: ignore[no-any-return]


@kind("distillation")
class Distilled(Job):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = Net(8).requires_grad_(False)

    def loss(self, step: int) -> Tensor:
        x = self.batch(step)
        with torch.no_grad():
            wanted = self.teacher(x)
        return F.mse_loss(self.model(x), wanted)


@kind("distillation, teacher with gradients on")
class DistilledFromFrozen(Distilled):
    def loss(self, step: int) -> Tensor:
        x = self.batch(step)
        return F.mse_loss(self.model(x), self.teacher(x))


@kind("contrastive")
class Contrastive(Job):
    def loss(self, step: int) -> Tensor:
        x = self.batch(step)
        one, other = self.model(x), self.model(x + 0.1 * torch.randn_like(x))
        return (one - other).square().mean() - 0.1 * (one - other.roll(1, 0)).square().mean()


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.block = Block()

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        y: Tensor = self.block(self.cell(x, h))
        return y


class Truncated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cell() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        following = []
        for layer, state in zip(self.layers, states, strict=True):
            x = layer(x, state)
            following.append(x)
        return self.head(x), following


@kind("truncated backward through time")
class ThroughTime(Job):
    def __init__(self) -> None:
        super().__init__()
        self.states = [torch.zeros(ROWS // 4, WIDTH) for _ in range(4)]

    def build(self) -> nn.Module:
        return Truncated()

    def loss(self, step: int) -> Tensor:
        states = [state.detach() for state in self.states]
        total = torch.zeros(())
        for _ in range(4):
            y, states = self.model(torch.randn(ROWS // 4, WIDTH), states)
            total = total + y.square().mean()
        self.states = [state.detach() for state in states]
        return total


class Skipping(Net):
    def forward(self, x: Any) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == 0 or torch.rand(()) > 0.2:
                x = layer(x)
        y: Tensor = self.head(x)
        return y


@kind("stochastic depth")
class Stochastic(Job):
    steps = 60
    expected = "any"

    def build(self) -> nn.Module:
        return Skipping()


@kind("learning rate schedule")
class Scheduled(Job):
    def __init__(self) -> None:
        super().__init__()
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=1e-2, total_steps=self.steps + 1
        )

    def step(self, step: int) -> None:
        super().step(step)
        self.schedule.step()


@kind("saved and loaded")
class Loaded(Job):
    steps = 32

    def step(self, step: int) -> None:
        if step == CHANGE:
            states = copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])
            self.model = self.build()
            self.optimizer = self.optimizer_of(self.model)
            self.model.load_state_dict(states[0])
            self.optimizer.load_state_dict(states[1])
        super().step(step)


@kind("loaded in place")
class LoadedInPlace(Job):
    def step(self, step: int) -> None:
        if step == CHANGE:
            self.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        super().step(step)


@kind("model copied")
class Copied(Job):
    steps = 32

    def step(self, step: int) -> None:
        if step == CHANGE:
            self.model = copy.deepcopy(self.model)
            self.optimizer = self.optimizer_of(self.model)
        super().step(step)


@kind("memory that grows")
class Keeping(Job):
    """A tensor more is kept after each step, up to a tenth of what a step takes."""

    steps = 44

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def step(self, step: int) -> None:
        super().step(step)
        if CHANGE <= step < CHANGE + 20:
            self.kept.append(torch.ones(6144))


@kind("data in memory, and a batch that grows a little")
class Holding(Job):
    """Five times a step's bytes are data, which no budget counts; batches grow by a tenth."""

    steps = 32

    def __init__(self) -> None:
        super().__init__()
        self.data = torch.randn(ROWS * 360, WIDTH)

    def batch(self, step: int) -> Any:
        rows = ROWS if step < CHANGE else ROWS + ROWS // 10
        return self.data[torch.randint(len(self.data), (rows,))]


@kind("short")
class Short(Job):
    steps = 4
    expected = "silent"


@kind("calls of checkpoint")
class Checkpointing(Job):
    saves_less_itself = True

    def build(self) -> nn.Module:
        return Net(call=lambda layer, x: checkpoint(layer, x, use_reentrant=False))


@kind("calls of reentrant checkpoint")
class Reentrant(Job):
    saves_less_itself = True

    def build(self) -> nn.Module:
        return Net(call=lambda layer, x: checkpoint(layer, x, use_reentrant=True))

    def batch(self, step: int) -> Any:
        return super().batch(step).requires_grad_()


class Rerun(torch.autograd.Function):
    """A checkpoint as people write it."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor, *_: Tensor) -> Tensor:
        ctx.layer, ctx.state = layer, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            y: Tensor = layer(x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.random.fork_rng(), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            y = ctx.layer(x)
        parameters = tuple(ctx.layer.parameters())
        return None, *torch.autograd.grad(y, (x, *parameters), grad)


@kind("a checkpoint of one's own")
class OwnFunction(Job):
    def build(self) -> nn.Module:
        return Net(call=lambda layer, x: Rerun.apply(layer, x, *layer.parameters()))

    def batch(self, step: int) -> Any:
        return super().batch(step).requires_grad_()


@kind("hooks on saved tensors")
class Packed(Job):
    """What is saved goes to NumPy's memory around blocks."""

    saves_less_itself = True

    def build(self) -> nn.Module:
        def call(layer: nn.Module, x: Tensor) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(
                lambda saved: saved
                if isinstance(saved, nn.Parameter)
                else saved.numpy().copy()
                if not saved.requires_grad
                else saved.detach().numpy().copy(),
                lambda packed: torch.from_numpy(packed)
                if isinstance(packed, np.ndarray)
                else packed,
            ):
                return layer(x)

        return Net(call=call)


@kind("a thread that evaluates")
class Threaded(Job):
    def build(self) -> nn.Module:
        return Net(block=lambda: Block(dropout=0.0))

    def loss(self, step: int) -> Tensor:
        loss = super().loss(step)

        def evaluate() -> None:
            with torch.no_grad():
                self.model(torch.ones(64, WIDTH))

        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()
        return loss


@kind("steps without a backward")
class Idle(Job):
    steps = 32

    def step(self, step: int) -> None:
        if step % 5 == 4:
            self.optimizer.step()
        else:
            super().step(step)


@kind("a second stage")
class Staged(Job):
    """Another model and optimizer from some step on."""

    steps = 32

    def step(self, step: int) -> None:
        if step == CHANGE:
            self.model = Net(4)
            self.optimizer = self.optimizer_of(self.model)
        super().step(step)


@kind("a model that comes late")
class Late(Gan):
    steps = 36

    def step(self, step: int) -> None:
        if step < CHANGE:
            Job.step(self, step)
        else:
            super().step(step)


@kind("batch norm in training")
class Normalized(Job):
    def build(self) -> nn.Module:
        def block() -> nn.Module:
            return nn.Sequential(
                nn.Linear(WIDTH, 2 * WIDTH),
                nn.BatchNorm1d(2 * WIDTH),
                nn.ReLU(inplace=True),
                nn.Linear(2 * WIDTH, WIDTH),
            )

        return Net(block=block)


@kind("a graph kept for two backwards")
class TwoBackwards(Job):
    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        y = self.model(self.batch(step))
        first, second = y.square().mean(), y.abs().mean()
        first.backward(retain_graph=True)
        second.backward()
        self.note(first, second)
        self.optimizer.step()
