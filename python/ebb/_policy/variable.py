"""The value of the variable EBB: what it means, and the same policy with one more rule."""

from __future__ import annotations

import functools
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

from _ebb_switches import is_set

from ebb import _C
from ebb._policy.compiled import PRESETS, rules_of
from ebb._policy.decision import Decision
from ebb._policy.rule import Rule
from ebb._policy.text import parsed, parsed_regions, policy_of, regions_to_toml, rule_line, to_toml

ON = ("1", "true", "yes", "on")  # values that mean `recompute_all`
_FILE = "policy.toml"


def is_file(text: str) -> bool:
    """True if EBB's value is a file. Names and rules take precedence over a file of that name: a
    mistyped redirection such as ``2>1`` creates a file that is called ``1``."""
    if os.sep in text or text.endswith((".toml", ".json")):
        return True
    is_name = text.lower() in ON or text in PRESETS or ":" in text
    return not is_name and os.path.isfile(text)


@functools.cache
def _contents(path: str) -> str:
    """A file as it was when the job first read it."""
    return Path(path).read_text(encoding="utf-8")


@dataclass(frozen=True)
class JobPolicy:
    """The policy that the variables give a job."""

    text: str  # EBB's value, or the contents of the file that it names
    is_file: bool  # True if `text` is such contents

    @staticmethod
    def of_variables() -> JobPolicy | None:
        """None if EBB is not set, if EBB_BUDGET replaces its policy, or if its file cannot be
        read."""
        if not is_set("EBB") or os.environ.get("EBB_BUDGET", "").strip():
            return None
        text = os.environ["EBB"]
        try:
            return JobPolicy(_contents(text) if is_file(text) else text, is_file(text))
        except (OSError, ValueError):
            return None

    def with_first(self, rule: Rule) -> tuple[str, str]:
        """The value for EBB that adds a rule as the first one, and the contents of the file that
        this value names; empty if it names none. Raises ValueError if the policy is invalid."""
        is_on = not self.is_file and self.text.lower() in ON
        if not self.is_file and rule == Rule(rule.op, rule.decision):
            added = f"{rule.op}:{rule.decision.name.lower()}"
            return added if is_on else f"{added},{self.text}", ""
        preset = "recompute_all" if is_on else self.text
        if not self.is_file and preset in PRESETS:
            return _FILE, f'preset = "{preset}"\nrules = [{rule_line(rule)}]\n'
        document = tomllib.loads(self.text) if self.is_file else {}
        if "regions" in document:
            regions, offload, ahead = parsed_regions(self.text, _FILE)
            groups = ((names, _with_first(rule, policy)) for names, policy in regions)
            return _FILE, regions_to_toml(groups, offload, ahead)
        policy = policy_of(document, _FILE) if self.is_file else parsed(self.text, late=True)
        return _FILE, _with_first(rule, policy)


def _with_first(rule: Rule, policy: _C.Policy) -> str:
    rules = (rule, *rules_of(policy))
    return to_toml(rules, Decision(policy.fallback()), Decision(policy.inputs()))
