"""Runs steps and then restores what they changed in the program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from ebb._plan.measuring import devices_of


@contextmanager
def as_before(model: torch.nn.Module) -> Iterator[None]:
    """Restore at the end: torch's random states, the model's gradients, and its buffers. Not
    restored: parameters and optimizer states that a step changes, and anything outside of torch.

    The copies are in host memory, so that they do not count as memory of the step.
    """
    gradients = [(p, p.grad, None if p.grad is None else _copy(p.grad)) for p in model.parameters()]
    buffers = [
        (module, name, buffer, _copy(buffer))
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.device.type != "meta" and not buffer.is_inference()
    ]
    with ExitStack() as random:
        random.enter_context(torch.random.fork_rng(devices=[]))
        for device in devices_of(model):
            if device.type != "cpu" and hasattr(torch.get_device_module(device), "get_rng_state"):
                index = torch.accelerator.current_device_index()
                which = [device.index if device.index is not None else index]
                random.enter_context(torch.random.fork_rng(which, device_type=device.type))
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, gradient, saved in gradients:
                    parameter.grad = gradient
                    if gradient is not None and saved is not None:
                        gradient.copy_(saved)
                for module, name, buffer, values in buffers:
                    module._buffers[name] = buffer
                    buffer.copy_(values)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return tensor.detach().to("cpu", copy=True) if is_plain else tensor.detach().clone()
