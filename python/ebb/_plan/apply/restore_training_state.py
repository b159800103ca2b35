"""Runs steps and then restores what they changed in the program."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.nn.parameter import is_lazy

from ebb._plan.profile.measuring import devices_of


@contextmanager
def restore_training_state(model: torch.nn.Module) -> Iterator[None]:
    """Restore at the end: the states of torch's default generators and of the modules' own, the
    model's gradients, and its buffers. Raises a ValueError if the model has lazy parameters or
    buffers."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"ebb: {name} is uninitialized (lazy). Run one forward of the model before ebb.plan"
            )
    restore = [(f"the gradient of {name}", _gradient_of(p)) for name, p in model.named_parameters()]
    for name, module in model.named_modules():
        restore.append((f"buffers of {name or 'the model'}", _buffers_of(module)))
    with ExitStack() as random:
        random.enter_context(torch.random.fork_rng(devices=[]))
        for device in devices_of(model):
            if device.type != "cpu" and hasattr(torch.get_device_module(device), "get_rng_state"):
                random.enter_context(torch.random.fork_rng([device.index], device_type=device.type))
        try:
            yield
        finally:
            for what, undo in restore:
                try:
                    with torch.no_grad():
                        undo()
                except Exception as error:  # an error of the step must not be hidden
                    warnings.warn(
                        f"ebb: ebb.plan could not restore {what} after its steps, so training may "
                        f"differ from training without a plan: {error}",
                        stacklevel=2,
                    )


def _gradient_of(parameter: torch.Tensor) -> Callable[[], None]:
    gradient = parameter.grad
    restore = _values_of(gradient)

    def undo() -> None:
        parameter.grad = gradient
        restore()

    return undo


def _buffers_of(module: torch.nn.Module) -> Callable[[], None]:
    buffers = dict(module._buffers.items())
    transient = set(module._non_persistent_buffers_set)
    restore = [_values_of(buffer) for buffer in buffers.values()]
    generators = [own for own in vars(module).values() if isinstance(own, torch.Generator)]
    states = [(generator, generator.get_state()) for generator in generators]

    def undo() -> None:
        for generator, state in states:
            generator.set_state(state)
        for key, buffer in buffers.items():
            module._buffers[key] = buffer
        module._non_persistent_buffers_set |= transient
        for values in restore:
            values()
        added = [key for key in module._buffers if key not in buffers]
        if added:  # they stay, since the module's other attributes may depend on them
            raise RuntimeError(
                f"the steps registered {', '.join(added)}; run one step before ebb.plan"
            )

    return undo


def _values_of(tensor: torch.Tensor | None) -> Callable[[], None]:
    """Restores the values of a tensor, from a copy in host memory, so that the copy does not count
    as memory of the step. Writes nothing if nothing has changed: the memory may be read-only, and a
    graph may have saved the tensor."""
    if tensor is None or tensor.device.type == "meta" or tensor.is_inference():
        return lambda: None
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    try:
        copy = tensor.detach().to("cpu", copy=True) if is_plain else tensor.detach().clone()
    except RuntimeError:  # a layout without copies, such as MKL-DNN's
        return lambda: None

    def undo() -> None:
        if tensor.shape != copy.shape or tensor.dtype != copy.dtype:
            tensor.data = copy.to(tensor.device)
        elif not _same(tensor.detach(), copy):
            tensor.copy_(copy)

    return undo


def _same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """True if the bits are equal; false if they cannot be compared."""
    try:
        now = tensor.to(copy.device)
        if now.layout is torch.strided and not now.is_quantized:
            now, copy = (t.contiguous().reshape(-1).view(torch.uint8) for t in (now, copy))
        return torch.equal(now, copy)
    except RuntimeError:  # of a layout without comparison
        return False
