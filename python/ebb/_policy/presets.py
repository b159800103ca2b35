"""The presets as C++ policies, by name. :mod:`ebb.policies` describes them."""

from __future__ import annotations

from ebb import _C

PRESETS: dict[str, _C.Policy] = {
    "recompute_all": _C.recompute_all(),
    "save_all": _C.save_all(),
    "save_matmuls": _C.save_matmuls(),
    "offload_inputs": _C.offload_inputs(),
    "recompute_collectives": _C.recompute_collectives(),
    "torchtitan": _C.torchtitan(),
    "torchtitan_full": _C.recompute_all(),
    "everything_saveable": _C.save_all(),
    "nothing_saveable": _C.recompute_all(),
    "dots_saveable": _C.dots_saveable(),
    "dots_with_no_batch_dims_saveable": _C.dots_with_no_batch_dims_saveable(),
    "offload_dot_with_no_batch_dims": _C.offload_dot_with_no_batch_dims(),
}
