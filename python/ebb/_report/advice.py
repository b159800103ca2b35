"""Rules that would save time, with their cost in bytes, computed from the replays of a recorded
step."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ebb._policy.decision import SAVE
from ebb._policy.rule import Rule
from ebb._policy.variable import JobPolicy
from ebb._report.rows import Row
from ebb._support.names import in_ranges, template

_REPLAYED = ("recomputed", "unneeded")
_HELD_FOR_REPLAYS = ("saved", "kept", "copied")  # kept for replays only, unless autograd packed it
_MOVED = ("offloaded", "paged")


@dataclass(frozen=True)
class Advice:
    """An additional first rule of a policy, and its effect."""

    op: str
    module: str  # for the rule's `module`; empty if no module is known
    where: str  # the modules, or the regions if no module is known
    layers: int  # the number of modules or regions
    source: str  # the line of the program that called the operator
    seconds: float  # approximate reduction of a step's time
    bytes: int  # additional bytes that are resident when the regions end
    # The assignment that adds the rule to the policy of the job's variables, as a shell takes it,
    # such as "EBB=policy.toml"; empty if the policy is not from EBB.
    variable: str = ""
    file: str = ""  # contents for the file that `variable` names; empty if it names none

    @property
    def rule(self) -> str:
        """The rule in Python."""
        module = f", module={self.module!r}" if self.module else ""
        return f"ebb.Rule({self.op!r}, ebb.SAVE{module})"


class Replays:
    """Finds the replays that a step would not need if its policy saved more, from a report's rows,
    values and replays. `policy`: of the job's variables."""

    def __init__(
        self,
        rows: Sequence[Row],
        values: Sequence[tuple[int, int, bool]],
        replays: Sequence[tuple[Sequence[int], Sequence[int], float]],
        policy: JobPolicy | None = None,
    ) -> None:
        self._rows, self._values, self._replays = rows, values, replays
        self._policy = policy
        self._counted = {row.op for row in rows if " call" in row.rule}
        self._seconds = self._typical_seconds()
        self._readers = Counter(value for inputs, _, _ in replays for value in set(inputs))
        self._makers: dict[int, list[int]] = defaultdict(list)
        for place, (_, outputs, _) in enumerate(replays):
            for value in outputs:
                if rows[values[value][0]].fate in _REPLAYED:
                    self._makers[value].append(place)

    def advice(self) -> tuple[Advice, ...]:
        """The rules, each considered alone, largest reduction of time first."""
        rows: dict[tuple[str, tuple[str, int]], list[Row]] = defaultdict(list)
        for row in self._rows:
            if row.fate in _REPLAYED and row.replays and row.rule and not row.reason:
                rows[row.op, template(row.module)].append(row)
        found = [self._advice(group) for group in rows.values()]
        return tuple(sorted(filter(None, found), key=lambda one: (-one.seconds, one.bytes)))

    def _typical_seconds(self) -> list[float]:
        """For each replay, the median time of replays of the same operator and storage sizes, since
        other work on the machine slows some of them."""
        alike: dict[object, list[int]] = defaultdict(list)
        for place, (inputs, outputs, _) in enumerate(self._replays):
            ops = {self._rows[self._values[value][0]].op for value in outputs}
            sizes = [[self._values[value][1] for value in some] for some in (inputs, outputs)]
            alike[str((sorted(ops), sizes))].append(place)
        found = [0.0] * len(self._replays)
        for places in alike.values():
            seconds = statistics.median(self._replays[place][2] for place in places)
            for place in places:
                found[place] = seconds
        return found

    def _advice(self, group: list[Row]) -> Advice | None:
        op, modules = group[0].op, list(dict.fromkeys(row.module for row in group))
        glob = modules[0] if len(modules) == 1 else template(modules[0])[0].replace("#", "*")
        glob = "" if glob == "*" else glob
        places = {
            place
            for place, row in enumerate(self._rows)
            if row.op == op and row.rule and (not glob or fnmatchcase(row.module, glob))
        }
        rows = [self._rows[place] for place in sorted(places)]
        if any(row.fate in _MOVED for row in rows) or op in self._counted:
            return None  # the rule would keep moved values too, or change the counting of calls
        seconds, nbytes = self._change(
            {
                value
                for value, (row, _, _) in enumerate(self._values)
                if row in places and value in self._makers
            }
        )
        if seconds <= 0:
            return None
        where = list(dict.fromkeys(row.where for row in rows if row.replays))
        names = ", ".join(in_ranges(where))
        source, variable = group[0].source, self._variable(op, glob)
        return Advice(op, glob, names, len(where), source, seconds, nbytes, *variable)

    def _variable(self, op: str, glob: str) -> tuple[str, str]:
        try:
            if self._policy is not None:
                value, file = self._policy.with_first(Rule(op, SAVE, module=glob or None))
                return f"EBB={shlex.quote(value)}", file
        except ValueError:  # the job was told that EBB is invalid, and its regions are its own
            pass
        return "", ""

    def _change(self, saved: set[int]) -> tuple[float, int]:
        """Seconds of the replays that are no longer needed, and additional resident bytes."""
        gone: set[int] = set()
        lost: Counter[int] = Counter()  # by value, the readers that are gone
        freed = 0
        following = [maker for value in saved for maker in self._makers[value]]
        while following:
            replay = following.pop()
            inputs, outputs, _ = self._replays[replay]
            if replay in gone or not all(
                value in saved or self._is_unused(value, lost)
                for value in outputs
                if value in self._makers
            ):
                continue
            gone.add(replay)
            for value in set(inputs):
                lost[value] += 1
                if value in saved or not self._is_unused(value, lost):
                    continue
                following += self._makers.get(value, ())
                row, nbytes, _ = self._values[value]
                freed += nbytes if self._rows[row].fate in _HELD_FOR_REPLAYS else 0
        added = sum(self._values[value][1] for value in saved if not self._is_unused(value, lost))
        return sum(self._seconds[replay] for replay in gone), added - freed

    def _is_unused(self, value: int, lost: Counter[int]) -> bool:
        return not self._values[value][2] and self._readers[value] == lost[value]
