"""The file that keeps a budget's plan for the next start of the job."""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from ebb._launch.agreeing import Vote, has_ranks
from ebb._launch.budgeted import Blocks
from ebb._launch.decided import Decided
from ebb._launch.made_for import MODEL_CHANGED, MadeFor, inputs_in_words, model_in_words
from ebb._launch.memory_limit import Limit
from ebb._launch.step_memory_monitor import Terms
from ebb._plan.apply.module_policies import ModulePolicies
from ebb._report.planned import BudgetPoint, Course, ReportedPlan
from ebb._support import job
from ebb._support.private_files import replace_private
from ebb._support.shown import clipped

_MOST_BYTES = 1 << 26  # of a file; no plan is as large
_HEAD = """\
# Plan of EBB_BUDGET={budget}@{name}. The next start of the job uses it from the first step on if
# all that [plan] says of the job still holds. Otherwise ebb plans anew and replaces this file.
# EBB={name} applies the policies without a budget.

"""


class PlanFileError(ValueError):
    """The file has no plan for this job, or cannot be written; the message says why."""


@dataclass(frozen=True)
class StoredPlan:
    made_for: MadeFor
    inputs: Mapping[str, int]  # as in `PlanFile`
    profiled: tuple[str, ...]  # names of its blocks; those without a policy stay as in eager
    candidate: int  # which choice of blocks, see `Blocks.candidate`
    is_around: bool  # True if there are regions around blocks
    decided: Decided
    terms: Terms
    checksum: str = ""  # covers the whole file

    def changed(self, now: MadeFor, inputs: tuple[str, int]) -> str:
        """What has changed since the plan was made; empty if it fits."""
        words, elements = inputs
        if changed := self.made_for.changed(now):
            return changed
        if words in self.inputs:
            return ""
        block, *_ = words.partition(": ")
        has_same_block = any(known.startswith(f"{block}: ") for known in self.inputs)
        if len(self.inputs) > 1 and has_same_block and elements <= max(self.inputs.values()):
            return ""
        before = clipped(", or ".join(self.inputs), 200)
        return f"the inputs of the first block were {before}, and are {clipped(words, 200)}"

    def to_toml(self) -> str:
        """The text of a file, without its head. Raises ValueError if it could not be read again."""
        table, regions = self._table(), self.decided.regions
        as_read_later = ModulePolicies._parse(regions._to_toml(table), "the plan")
        return regions._to_toml(table | {"checksum": _checksum(table, as_read_later)})

    def _table(self) -> dict[str, object]:
        decided, terms, reported = self.decided, self.terms, self.decided.reported
        table: dict[str, object] = {
            **vars(self.made_for),
            "inputs": list(self.inputs),
            "elements": list(self.inputs.values()),
            "profiled": list(self.profiled),
            "blocks": self.candidate,
            "around": self.is_around,
            **decided.figures(),
            "limit": terms.budget,
            "freed": terms.freed,
        }
        if reported is not None:
            table["step_limit"] = reported.budget
            for name, course in (("", reported.predicted), ("plain_", reported.plain)):
                if course.duration is not None:
                    table[f"{name}duration"] = round(course.duration, 3)
        return table

    @staticmethod
    def parse(text: str, name: str, path: str = "") -> StoredPlan:
        """The plan whose `to_toml` returned `text`. `name`: the file's name, for errors. `path`:
        the file, for reports."""
        try:
            table = dict(tomllib.loads(text)["plan"])
            policies = ModulePolicies._parse(text, name)
            checksum = table.pop("checksum")
            if checksum != _checksum(table, policies):
                raise PlanFileError("it was changed after ebb had written it")
            inputs = dict(zip(table["inputs"], table["elements"], strict=True))
            decided = Decided.of(policies, table, _reported(table, policies, path))
            terms = Terms(table["limit"], None, table["freed"])
            blocks = tuple(table["profiled"]), table["blocks"], table["around"]
            made_for = MadeFor(**{field.name: table[field.name] for field in fields(MadeFor)})
            return StoredPlan(made_for, inputs, *blocks, decided, terms, checksum)
        except PlanFileError:
            raise
        except KeyError as error:
            raise PlanFileError(f"it is damaged: {error} is missing") from None
        except (TypeError, ValueError, RecursionError, NotImplementedError) as error:
            why = clipped(str(error).removeprefix("ebb: "), 200)
            raise PlanFileError(f"it is damaged: {why}") from None


def _checksum(table: Mapping[str, object], policies: ModulePolicies) -> str:
    text = policies._to_toml(table)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _reported(table: Mapping[str, Any], policies: ModulePolicies, path: str) -> ReportedPlan | None:
    """The plan as reports show it: the file has no other budgets, and no timeline."""
    if "step_limit" not in table:
        return None
    budget, duration = table["step_limit"], table.get("duration")
    point = BudgetPoint(budget, table["peak"], duration or 0.0, 0, True, ())
    reported = ReportedPlan(
        budget,
        Course(table["peak"], duration),
        Course(table["plain_peak"], table.get("plain_duration")),
        policies.policies,
        lambda: (point,),
    )
    reported.source = path
    reported.keep_points(True)
    return reported


# Note [Plans in files]
# ebb reads the file before the first forward of the first model, and decides when a block is first
# called with gradients: only then does ebb know the inputs of the first step.
# Ranks may have different plans:
# * Ranks that share a plan have one file, which the first of them writes: rank 0 writes
#   `plan.toml`, rank n `plan.rankn.toml` (the first rank of a stage of a pipeline).
# * A rank takes the first of these files that was made for a model like its own.
# * If the file of any rank does not fit, all ranks measure: see Note [Ranks that vote].
# A process that multiprocessing started without a rank of its own reads and writes no file: several
# such processes may train at the same time.
class PlanFile:
    """The file of a budget's plan, and those of other ranks."""

    def __init__(self, path: str, budget: int | float | Limit, patterns: tuple[str, ...]) -> None:
        self.path = path  # absolute
        self.name = clipped(os.path.basename(path), 100)
        self.stored: StoredPlan | None = None  # the plan that was taken, or may be
        self.vote = Vote()  # what this rank tells the others, see `Ranks.vote`
        self.writer = 0  # the rank that writes the file of this rank's plan
        self.now: MadeFor | None = None  # set when a block is first called with gradients
        # The inputs of the first block in each measured step, in words, with their numbers of
        # elements. Only of the first choice of blocks: see Note [Plans that are taken].
        self.inputs: dict[str, int] = {}
        self._budget, self._patterns = budget, patterns
        self._models: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._error = ""  # why no file fits
        self._found: list[tuple[int, StoredPlan]] | None = None  # files that could be read

    def path_of(self, rank: int) -> str:
        """The file that a rank writes."""
        if rank == 0:
            return self.path
        stem, suffix = os.path.splitext(self.path)
        return f"{stem}.rank{rank}{suffix}"

    def read(self) -> None:
        if self._found is None:
            self._found = []
            for rank, path in self._paths():
                try:
                    if (text := _text_of(path)) is not None:
                        stored = StoredPlan.parse(text, self.name, clipped(path, 1000))
                        self._found.append((rank, stored))
                except PlanFileError as error:
                    self._error = self._error or str(error)
                except (OSError, ValueError) as error:
                    self._error = self._error or f"it cannot be read: {error}"
            self.stored = self._found[0][1] if self._found else None

    def _paths(self) -> Iterator[tuple[int, str]]:
        if job.is_helper():
            return
        yield 0, self.path
        if not has_ranks() and job.rank() == 0:
            return
        stem, suffix = map(re.escape, os.path.splitext(os.path.basename(self.path)))
        with suppress(OSError):
            names = os.listdir(os.path.dirname(self.path))
            found = (re.fullmatch(rf"{stem}\.rank(\d+){suffix}", name) for name in names)
            for rank in sorted(int(match[1]) for match in found if match):
                yield rank, self.path_of(rank)

    def met(self, model: torch.nn.Module) -> None:
        """Call with each model that has blocks, in the order of their first forwards."""
        if model not in self._models:
            self._models[model] = model_in_words(model)

    def models(self) -> list[str]:
        """The models that have been met and still exist, in words."""
        return list(self._models.values())

    def is_for(self, device: torch.device) -> MadeFor:
        """Set `now`, before a plan changes settings."""
        self.now = MadeFor.of_job(self._budget, self._patterns, device, self.models())
        return self.now

    def note_inputs(self, name: str, inputs: object) -> None:
        """Call with the inputs of the first block that is called with gradients in a step."""
        words, elements = inputs_in_words(name, inputs)
        self.inputs[words] = elements

    def choose(self, device: torch.device) -> str:
        """Choose the plan to take, for the inputs that have been noted: sets `stored` and `vote`.
        Returns why none is taken; empty if one is, or if no file exists."""
        self.read()
        now = self.is_for(device)
        [inputs] = self.inputs.items()
        self.stored = None
        reasons = [self._error] if self._error else []
        for rank, stored in self._found or ():
            changed = stored.changed(now, inputs)
            if not changed:
                self.stored, self.writer = stored, rank
                self.vote = Vote(" ".join(now.models), stored.checksum)
                return ""
            reasons.append(changed)
        # The files of other ranks are for other models.
        why = next((one for one in reasons if one != MODEL_CHANGED), "".join(reasons[:1]))
        self.vote = Vote(why=why or "there is no file")
        return why

    def lists_models(self) -> bool:
        """True if the plan that was taken is for all models that have been met."""
        models = self.models()
        return self.stored is not None and self.stored.made_for.models[: len(models)] == models

    def writes(self) -> bool:
        """True if this process writes the file of its plan."""
        if self.now is None or job.is_helper():
            return False
        return not has_ranks() or job.rank() == self.writer

    def write(self, decided: Decided, terms: Terms, blocks: Blocks, profiled: Iterable[str]) -> str:
        """Write a plan that is in place. Returns the path. `profiled`: of `StoredPlan`."""
        assert self.now is not None
        path = self.path_of(job.rank())
        made_for = replace(self.now, models=self.models())
        try:
            names = {block.name for block in blocks.alive()}
            is_around = not names.issuperset(decided.regions.policies)
            of_blocks = tuple(profiled), blocks.candidate, is_around
            stored = StoredPlan(made_for, self.inputs, *of_blocks, decided, terms)
            text = stored.to_toml()
            head = _HEAD.format(budget=made_for.budget.removesuffix(" bytes"), name=self.name)
            _check_may_replace(path)
            replace_private(path, head + text)
        except (OSError, ValueError, NotImplementedError) as error:
            # `strerror` does not name a temporary file.
            words = getattr(error, "strerror", None) or str(error)
            why = clipped(words.removeprefix("ebb: "), 300)
            raise PlanFileError(
                f"the plan could not be written to {clipped(path, 1000)}: {why}"
            ) from None
        return path


def _text_of(path: str) -> str | None:
    """The text of a file; None if there is none. Raises OSError or ValueError."""
    if not os.path.lexists(path):
        return None
    if not os.path.isfile(path):
        raise OSError(f"{clipped(path, 1000)} is no file")
    if os.path.getsize(path) > _MOST_BYTES:
        raise OSError("it is too large for a plan")
    return Path(path).read_text(encoding="utf-8")


def _check_may_replace(path: str) -> None:
    """A mistyped path must not cost the user a file that is no plan."""
    if os.path.lexists(path) and not os.path.isfile(path):
        raise PlanFileError("it is no file")
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            begin = file.read(1 << 16)
    except FileNotFoundError:
        return
    if begin.strip() and not any(mark in begin for mark in (_HEAD[:22], "[plan]", "[[regions]]")):
        raise PlanFileError("the file exists and is no plan of ebb, which does not replace it")
