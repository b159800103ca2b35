"""What a budget's plan was made for: a plan in a file is taken only for the same."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ebb._config import config
from ebb._launch.agreeing import has_ranks
from ebb._launch.memory_limit import Limit, there_is
from ebb._support import devices
from ebb._support.shown import clipped

_NEAR = 0.02  # share by which memory limits may differ: a kernel reserves more or less
_DIGITS = 16  # of a hash
MODEL_CHANGED = "the model has changed (its class, modules or parameters)"


@dataclass(frozen=True)
class MadeFor:
    budget: str  # in words that do not depend on how the user wrote it
    torch_release: str
    ebb_release: str
    device: str  # kind of the device
    memory_limit: int  # bytes that the job may use on the device; 0: unknown
    ranks: int  # how many ranks the job has
    settings: str  # EBB_MODULES, and a hash of the settings in ``ebb.config``
    models: list[str]  # class and hash of those with blocks, in order of first forwards

    @staticmethod
    def of_job(
        budget: int | float | Limit,
        patterns: tuple[str, ...],
        device: torch.device,
        models: list[str],
    ) -> MadeFor:
        return MadeFor(
            _in_words(budget),
            torch.__version__,
            sys.modules["ebb"].__version__,
            f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type,
            _limit_of(device),
            dist.get_world_size() if has_ranks() else 1,
            f"{','.join(patterns)} {_hash(_config_in_words())}".strip(),
            models,
        )

    def changed(self, now: MadeFor) -> str:
        """What has changed; empty if a plan that was made for this fits `now`. Models that `now`
        does not have yet may come later."""
        words = {
            "budget": "the budget",
            "torch_release": "torch",
            "ebb_release": "ebb",
            "device": "the device",
        }
        for name, what in words.items():
            before, after = getattr(self, name), getattr(now, name)
            if before != after:
                return f"{what} was {clipped(before)}, and is {clipped(after)}"
        before, after = self.memory_limit, now.memory_limit
        if abs(before - after) > _NEAR * max(before, after):
            return f"the memory limit was {before} bytes, and is {after}"
        if self.ranks != now.ranks:
            return f"the job had {self.ranks} ranks, and has {now.ranks}"
        if self.settings != now.settings:
            return "EBB_MODULES or settings in ebb.config have changed"
        if self.models[: len(now.models)] != now.models:
            return MODEL_CHANGED
        return ""


def _in_words(budget: int | float | Limit) -> str:
    if isinstance(budget, Limit):
        return f"auto:{budget.given}" if budget.given else "auto"
    return f"{100 * budget:.10g}%" if isinstance(budget, float) else f"{budget} bytes"


def _config_in_words() -> str:
    settings = config.to_dict()
    if "offload.disk" in settings:  # each start may have a folder of its own
        settings["offload.disk"] = bool(settings["offload.disk"])
    return json.dumps(settings, default=str)


def _limit_of(device: torch.device) -> int:
    """The limit does not depend on what other processes use."""
    if device.type == "cpu":
        device = devices.in_use() or device
    try:
        if device.type == "cpu":
            return there_is(device)
        if device.type == "cuda":
            return devices.allowed_of(device)
        return int(torch.accelerator.get_memory_info(device)[1])
    except (ValueError, RuntimeError, NotImplementedError):
        return 0


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:_DIGITS]


def model_in_words(model: torch.nn.Module) -> str:
    """A model's class, and a hash of its modules, parameters and buffers without their values."""
    lines = [f"{name} {_class_of(module)}" for name, module in model.named_modules()]
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in kind():
            lines.append(
                f"{name} {_tensor_in_words(tensor)} {tensor.requires_grad} {tensor.device.type}"
            )
    return f"{_class_of(model)} {_hash(chr(10).join(lines))}"


def _class_of(module: torch.nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _tensor_in_words(tensor: torch.Tensor) -> str:
    try:
        shape = str(list(tensor.shape))
    except RuntimeError:  # of a lazy module
        shape = "?"
    return f"{_name_of(tensor.dtype)}{shape}"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def inputs_in_words(name: str, inputs: object) -> tuple[str, int]:
    """The tensors with which a block was called, and how many elements they have. Autocast changes
    what a block computes with, so the words name it."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    words = ", ".join(map(_tensor_in_words, tensors))
    device = tensors[0].device.type if tensors else "cpu"
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        words += f" under autocast to {_name_of(torch.get_autocast_dtype(device))}"
    return f"{name}: {words}", sum(tensor.numel() for tensor in tensors)
