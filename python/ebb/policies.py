"""Policies with a name.

>>> with ebb.region(ebb.policies.save_matmuls):
...     pass
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from ebb import _C
from ebb._policy.compiled import checked
from ebb._policy.decision import OFFLOAD, RECOMPUTE, SAVE
from ebb._policy.policy import Policy
from ebb._policy.presets import PRESETS
from ebb._policy.rule import Rule
from ebb._support.shown import shown

__all__ = [
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "either",
    "everything_saveable",
    "megatron",
    "nothing_saveable",
    "offload_dot_with_no_batch_dims",
    "offload_inputs",
    "recompute_all",
    "save_all",
    "save_and_offload_only_these_names",
    "save_matmuls",
    "save_only_these_names",
    "torchtitan",
    "torchtitan_full",
]


def __getattr__(name: str) -> Any:
    near = get_close_matches(name, __all__, 1)
    hint = f"; the nearest is {near[0]!r}" if near else f"; there are {', '.join(__all__)}"
    raise AttributeError(f"ebb.policies has no {shown(name)}{hint if name[:1] != '_' else ''}")


def _preset(name: str) -> Policy:
    return Policy._from_compiled(PRESETS[name])


recompute_all: Policy = _preset("recompute_all")
"""Keeps nothing but leaves: the most memory saved, the most recomputed."""

save_all: Policy = _preset("save_all")
"""Keeps everything that anything needs, as if ebb were not there."""

save_matmuls: Policy = _preset("save_matmuls")
"""Keeps what is dear to recompute: matrix products, convolutions and attention."""

offload_inputs: Policy = _preset("offload_inputs")
"""Recomputes everything, and moves to the host what the region reads and another autograd function
computed: the activations between blocks."""

torchtitan: Policy = _preset("torchtitan")
"""torchtitan's SelectiveAC: attention and collectives kept, and every second matrix product.
Source: https://github.com/pytorch/torchtitan"""

torchtitan_full: Policy = recompute_all
"""torchtitan's FullAC, on each layer."""

everything_saveable: Policy = save_all
"""JAX's name of :data:`save_all`. Source, of all of JAX's names here: https://docs.jax.dev,
``jax.checkpoint_policies``"""

nothing_saveable: Policy = recompute_all
"""JAX's name of :data:`recompute_all`."""

dots_saveable: Policy = _preset("dots_saveable")
"""Keeps products of matrices, and of batches of them."""

dots_with_no_batch_dims_saveable: Policy = Policy._from_compiled(
    PRESETS["dots_with_no_batch_dims_saveable"]
)
"""Keeps products of matrices, but not of batches of them: weights are there, attention is not."""

offload_dot_with_no_batch_dims: Policy = Policy._from_compiled(
    PRESETS["offload_dot_with_no_batch_dims"]
)
"""Moves to the host what :data:`dots_with_no_batch_dims_saveable` keeps."""


def save_only_these_names(*names: str) -> Policy:
    """Keeps what :func:`ebb.checkpoint_name` gave one of these names, and recomputes the rest.

    Raises:
        TypeError: a name is not a string.
    """
    return save_and_offload_only_these_names(names, ())


def save_and_offload_only_these_names(
    names_which_can_be_saved: Iterable[str], names_which_can_be_offloaded: Iterable[str]
) -> Policy:
    """Keeps or moves to the host what has one of these names, and recomputes the rest.

    Raises:
        TypeError: a name is not a string.
    """
    rules = [Rule("*", SAVE, name=name) for name in names_which_can_be_saved]
    rules += [Rule("*", OFFLOAD, name=name) for name in names_which_can_be_offloaded]
    return Policy(rules)


def either(*policies: Policy) -> Policy:
    """Does what the first policy says, and what the next one says where that is RECOMPUTE.

    So it keeps what either keeps, as JAX's ``save_from_both_policies``.

    Raises:
        TypeError: there is no policy, or an argument is none.
    """
    if not policies:
        raise TypeError("ebb: either takes at least one policy")
    for policy in policies:
        if not isinstance(policy, Policy):
            raise TypeError(f"ebb: either takes policies; got {type(policy).__name__}")
    return Policy._from_compiled(
        checked(functools.reduce(_C.either, [p._compiled for p in policies]))
    )


_ACTIVATIONS = ("aten::gelu", "aten::silu", "aten::relu", "aten::mul", "aten::glu")
_NORMS = ("aten::*layer_norm*", "aten::*rms_norm*")
_MEGATRON: dict[str, list[Rule]] = {
    "core_attn": [Rule("*", RECOMPUTE, module="*core_attention*")],
    "mlp": [Rule("*", RECOMPUTE, module="*mlp*")],
    "moe": [Rule("*", RECOMPUTE, module="*mlp*")],
    "shared_experts": [Rule("*", RECOMPUTE, module="*shared_experts*")],
    "moe_act": [Rule(op, RECOMPUTE, module="*.experts*") for op in _ACTIVATIONS],
    "layernorm": [Rule(op, RECOMPUTE) for op in _NORMS],
    "mla_up_proj": [
        Rule("*", RECOMPUTE, module="*linear_q_up_proj*"),
        Rule("*", RECOMPUTE, module="*linear_kv_up_proj*"),
    ],
}


def megatron(*modules: str) -> Policy:
    """Megatron-LM's ``--recompute-granularity selective`` with these ``--recompute-modules``.

    Recomputes what is made in them and keeps everything else. The modules are known by the names
    that Megatron-Core's transformer layer gives them, under :func:`ebb.apply` or in a region with
    ``root=``.

    Args:
        modules: some of ``core_attn``, ``layernorm``, ``mla_up_proj``, ``mlp``, ``moe``,
            ``moe_act``, ``shared_experts``; ``core_attn`` if there is none.

    Raises:
        ValueError: there is no such module.

    Source: https://github.com/NVIDIA/Megatron-LM, ``TransformerConfig.recompute_modules``
    """
    for name in modules:
        if not isinstance(name, str) or name not in _MEGATRON:
            raise ValueError(f"ebb: {shown(name)} is none of {', '.join(sorted(_MEGATRON))}")
    rules = [rule for name in modules or ("core_attn",) for rule in _MEGATRON[name]]
    return Policy(rules, default=SAVE)
