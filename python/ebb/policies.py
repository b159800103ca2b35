"""Presets: policies with a name.

>>> with ebb.region(ebb.policies.save_matmuls):
...     pass
"""

from __future__ import annotations

from typing import Any

from ebb._policy.compiled import PRESETS
from ebb._policy.decision import RECOMPUTE, SAVE
from ebb._policy.policy import Policy
from ebb._policy.rule import Rule
from ebb._policy.text import nearest
from ebb._support.shown import shown

__all__ = [
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "megatron",
    "offload_inputs",
    "recompute_all",
    "recompute_collectives",
    "save_all",
    "save_matmuls",
    "save_only_these_names",
    "torchtitan",
]


def __getattr__(name: str) -> Any:
    hint = "" if name.startswith("_") else f"; {nearest(name, __all__)}"
    raise AttributeError(f"ebb.policies has no preset {shown(name)}{hint}")


def _preset(name: str) -> Policy:
    return Policy._from_compiled(PRESETS[name])


recompute_all: Policy = _preset("recompute_all")
"""Saves only region inputs and parameters: the lowest memory, the most recomputation."""

save_all: Policy = _preset("save_all")
"""Saves all outputs that backward needs, as eager does."""

save_matmuls: Policy = _preset("save_matmuls")
"""Saves the outputs that are expensive to recompute: matrix products, convolutions, attention."""

offload_inputs: Policy = _preset("offload_inputs")
"""Recomputes everything, and offloads the region's inputs that have a ``grad_fn``: the activations
between blocks."""

recompute_collectives: Policy = _preset("recompute_collectives")
"""Recomputes everything, including the results of collectives, which other presets save. All ranks
must run the same regions, and their backward in the same order: ebb compares the ranks' collectives
and raises RuntimeError where they differ."""

torchtitan: Policy = _preset("torchtitan")
"""torchtitan's SelectiveAC: saves attention, collectives and every second matrix product.
Source: https://github.com/pytorch/torchtitan"""

dots_saveable: Policy = _preset("dots_saveable")
"""Saves matrix products and batched matrix products. Source of JAX's names here:
https://docs.jax.dev, ``jax.checkpoint_policies``"""

dots_with_no_batch_dims_saveable: Policy = _preset("dots_with_no_batch_dims_saveable")
"""Saves matrix products but not batched ones: products with weights, but not attention."""


def save_only_these_names(*names: str) -> Policy:
    """Saves tensors that ``ebb.checkpoint_name`` gave one of these names; recomputes the rest.

    Raises:
        TypeError: a name is not a string.

    Examples:
        >>> x = torch.ones(3, requires_grad=True)
        >>> with ebb.region(ebb.policies.save_only_these_names("h")):
        ...     h = ebb.checkpoint_name(x.sin(), "h")
        ...     loss = h.cos().sum()
    """
    return Policy([Rule("*", SAVE, name=name) for name in names])


_ACTIVATIONS = ("aten::gelu", "aten::silu", "aten::relu", "aten::mul", "aten::glu")
_NORMS = ("aten::*layer_norm*", "aten::*rms_norm*")
_MEGATRON: dict[str, list[Rule]] = {
    "core_attn": [Rule("*", RECOMPUTE, module="*core_attention*")],
    "mlp": [Rule("*", RECOMPUTE, module="*mlp*")],
    "moe": [Rule("*", RECOMPUTE, module="*mlp*")],
    "shared_experts": [Rule("*", RECOMPUTE, module="*shared_experts*")],
    "moe_act": [Rule(op, RECOMPUTE, module="*.experts*")._as_of_preset() for op in _ACTIVATIONS],
    "layernorm": [Rule(op, RECOMPUTE)._as_of_preset() for op in _NORMS],
    "mla_up_proj": [
        Rule("*", RECOMPUTE, module="*linear_q_up_proj*"),
        Rule("*", RECOMPUTE, module="*linear_kv_up_proj*"),
    ],
}


def megatron(*modules: str) -> Policy:
    """Megatron-LM's ``--recompute-granularity selective`` with these ``--recompute-modules``.

    Recomputes the outputs of ops in these modules and saves everything else. ``layernorm``
    recomputes norms in any module, ``moe_act`` only activation functions. The rules match modules
    by the names in Megatron-Core's transformer layer, under ``ebb.apply`` or in a region with
    ``root=``.

    Args:
        modules: some of ``core_attn``, ``layernorm``, ``mla_up_proj``, ``mlp``, ``moe``,
            ``moe_act``, ``shared_experts``; default ``core_attn``.

    Raises:
        ValueError: a name is not one of these.

    Examples:
        >>> policy = ebb.policies.megatron("core_attn", "layernorm")

    Source: https://github.com/NVIDIA/Megatron-LM, ``TransformerConfig.recompute_modules``
    """
    for name in modules:
        if not isinstance(name, str) or name not in _MEGATRON:
            raise ValueError(
                f"ebb: ebb.policies.megatron: unknown module {shown(name)}; "
                f"valid names: {', '.join(sorted(_MEGATRON))}"
            )
    rules = [rule for name in modules or ("core_attn",) for rule in _MEGATRON[name]]
    return Policy(rules, default=SAVE)
