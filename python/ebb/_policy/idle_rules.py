"""Warns of rules that have no effect because ebb never sees their operators or modules."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch

from ebb._policy.compiled import matching, registered
from ebb._policy.rule import Rule, operator_name
from ebb._support.shown import shown

# The operators to which torch decomposes a composite operator before ebb sees it.
_DECOMPOSED = {
    "linear": "aten::mm, aten::addmm",
    "matmul": "aten::mm, aten::bmm",
    "einsum": "aten::bmm",
    "scaled_dot_product_attention": "aten::_scaled_dot_product_*",
    "layer_norm": "aten::native_layer_norm",
    "group_norm": "aten::native_group_norm",
    "batch_norm": "aten::native_batch_norm, aten::cudnn_batch_norm",
    "dropout": "aten::native_dropout, aten::bernoulli_",
    "softmax": "aten::_softmax",
    "log_softmax": "aten::_log_softmax",
    "cross_entropy_loss": "aten::_log_softmax, aten::nll_loss_forward",
    "conv1d": "aten::convolution",
    "conv2d": "aten::convolution",
    "conv3d": "aten::convolution",
}

_PACKAGE = os.path.dirname(os.path.dirname(__file__))  # the folder of ebb

_told: set[str] = set()  # patterns that a warning has named


def _warn(message: str) -> None:
    """Warns with the line of the program that called ebb."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def warn_of_composites(rules: Iterable[Rule]) -> None:
    """Warns, once for each pattern, of rules that match only composite operators. torch decomposes
    these before ebb sees them. Presets have such rules for devices that do not decompose them.
    """
    patterns = dict.fromkeys(operator_name(rule.op) for rule in rules if not rule._is_of_preset)
    unknown = [pattern for pattern in patterns if pattern not in _told]
    if not unknown:
        return
    operators = registered()
    for pattern in unknown:
        found = matching(pattern if "::" in pattern else f"aten::{pattern}", operators)
        names = [op.removesuffix(".default") for op in found if not op.endswith("out")]
        if names and all(map(_is_composite, names)):
            _told.add(pattern)
            base = names[0].partition("::")[2].partition(".")[0]
            instead = "ebb.report() lists the operators that ebb sees"
            if base in _DECOMPOSED:
                instead = f"Use these operators instead: {_DECOMPOSED[base]}"
            _warn(
                f"ebb: the rule {shown(pattern)} has no effect: torch decomposes {names[0]} before "
                f"ebb sees it. {instead}."
            )


def _is_composite(name: str) -> bool:
    def has_kernel(key: str) -> bool:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))

    return has_kernel("CompositeImplicitAutograd") and not has_kernel("CPU")


def warn_of_modules(rules: Iterable[Rule], names: Iterable[str]) -> None:
    """Warns, once for each glob, of rules whose ``module`` matches none of these names."""
    known = set(names)
    for glob in dict.fromkeys(rule.module for rule in rules if rule.module):
        if glob not in _told and not any(fnmatchcase(name, glob) for name in known):
            _told.add(glob)
            few = ", ".join(sorted(known - {""})[:8])
            _warn(
                f"ebb: the policy has a rule for modules that match {shown(glob)}, but the model "
                f"has none. Some of its modules: {few}."
            )


@functools.cache
def warn_of_no_root() -> None:
    """Warns once: the policy has rules with `module=`, but the region has no `root`."""
    _warn(
        "ebb: rules with module= have no effect in this region, because it has no root model. "
        "Use ebb.apply, or ebb.region(policy, root=model)."
    )
