"""ebb lowers a training job's activation memory, op by op; gradients are bit-identical to eager's.

>>> import torch, ebb
>>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
>>> with ebb.region(ebb.policies.recompute_all):
...     loss = net(torch.ones(2, 4)).sum()
>>> loss.backward()
"""

from __future__ import annotations

import torch as _torch

from ebb import _find_native

__version__ = _find_native.VERSION
__path__.insert(0, str(_find_native.find(_torch.__version__)))  # `ebb._C` is there

from ebb import experimental, policies  # noqa: E402
from ebb._config import config  # noqa: E402
from ebb._launch.start import start as _start  # noqa: E402
from ebb._plan.apply.module_policies import ModulePolicies  # noqa: E402
from ebb._plan.choose.memory_budget import BudgetError  # noqa: E402
from ebb._plan.plan import Plan, plan  # noqa: E402
from ebb._plan.profile.profile import Profile  # noqa: E402
from ebb._plan.profile.recording import profile  # noqa: E402
from ebb._policy.decision import (  # noqa: E402
    OFFLOAD,
    PAGE,
    RECOMPUTE,
    RECOMPUTE_EACH_TIME,
    SAVE,
)
from ebb._policy.policy import Policy  # noqa: E402
from ebb._policy.rule import Rule, checkpoint_name  # noqa: E402
from ebb._region.apply import apply, remove  # noqa: E402
from ebb._region.checkpoint import checkpoint  # noqa: E402
from ebb._region.disable import disable  # noqa: E402
from ebb._region.global_state_guard import watch_memory_history as _watch  # noqa: E402
from ebb._region.region import region  # noqa: E402
from ebb._region.unseen_writes import opaque  # noqa: E402
from ebb._region.verify import ReplayMismatch, verify  # noqa: E402
from ebb._report.metrics import metrics, reset_stats, stats  # noqa: E402
from ebb._report.recording import record_reports  # noqa: E402
from ebb._report.report import Report, report  # noqa: E402

_watch()

__all__ = [
    "OFFLOAD",
    "PAGE",
    "RECOMPUTE",
    "RECOMPUTE_EACH_TIME",
    "SAVE",
    "BudgetError",
    "ModulePolicies",
    "Plan",
    "Policy",
    "Profile",
    "ReplayMismatch",
    "Report",
    "Rule",
    "apply",
    "checkpoint",
    "checkpoint_name",
    "config",
    "disable",
    "experimental",
    "metrics",
    "opaque",
    "plan",
    "policies",
    "profile",
    "record_reports",
    "region",
    "remove",
    "report",
    "reset_stats",
    "stats",
    "verify",
]

_start()
