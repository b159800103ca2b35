"""The frameworks whose checkpoint functions ebb takes over, and those that it only names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ebb._launch.frameworks import calls


@dataclass(frozen=True)
class Framework:
    """One module of a framework.

    Attributes:
        name: for messages.
        distribution: its name in the package index, which gives the version.
        tested: the versions with which these functions were tested, without their last part.
        module: the module that defines the functions.
        functions: their names in the module, each with the function that supplies the new code. It
            takes the same arguments.
    """

    name: str
    distribution: str
    tested: tuple[str, ...]
    module: str
    functions: Mapping[str, Callable[..., Any]]


FRAMEWORKS = (
    Framework(
        "Megatron-Core",
        "megatron-core",
        ("0.14", "0.15", "0.16"),
        "megatron.core.tensor_parallel.random",
        {
            "checkpoint": calls.code_of_megatron,
            "CheckpointWithoutOutput.checkpoint": calls.code_of_without_output,
            "CheckpointWithoutOutput.discard_output_and_register_recompute": calls.code_of_discard,
        },
    ),
    Framework(
        "Megatron-Core",
        "megatron-core",
        ("0.14", "0.15", "0.16"),
        "megatron.core.utils",
        {"GlobalMemoryBuffer.get_tensor": calls.code_of_buffer},
    ),
    Framework(
        "DeepSpeed",
        "deepspeed",
        ("0.18", "0.19"),
        "deepspeed.runtime.activation_checkpointing.checkpointing",
        {
            "checkpoint": calls.code_of_deepspeed,
            "non_reentrant_checkpoint": calls.code_of_deepspeed_without_reentrant,
        },
    ),
    Framework(
        "fairscale",
        "fairscale",
        ("0.4",),
        "fairscale.nn.checkpoint.checkpoint_activations",
        {"_checkpointed_forward": calls.code_of_fairscale},
    ),
)

# Functions that recompute by themselves and that ebb leaves alone: the module, the function, and
# the name for messages.
OTHERS = (
    ("transformer_engine.pytorch.distributed", "checkpoint", "transformer_engine's checkpoint"),
    ("fairscale.nn.pipe.checkpoint", "Checkpointing.checkpoint", "fairscale's pipeline checkpoint"),
)
