"""Training loops that do more than train: several models, copies, evaluation, threads, files."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from budget_jobs.job import CHANGE, ROWS, WIDTH, Block, Job, Net, kind


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
    """Computes a validation loss with gradients enabled, and drops its graph."""

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


@kind("SWA")
class Swa(Job):
    def __init__(self) -> None:
        super().__init__()
        self.average = torch.optim.swa_utils.AveragedModel(self.model)

    def step(self, step: int) -> None:
        super().step(step)
        if step % 4 == 3:
            self.average.update_parameters(self.model)


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
    """Activation checkpointing as a user might write it."""

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
    """Saved-tensor hooks around each block copy saved tensors to NumPy arrays."""

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
