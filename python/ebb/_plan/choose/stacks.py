"""Chooses for several blocks in one region. In: a simulated step. Out: a step with such regions.

The module around the blocks becomes the region, and the blocks become inner regions. Values that
one block passes to the next need not stay in memory: they are recomputed from earlier values. So
memory for n blocks goes down to the inputs of each group of blocks and the results inside one
group. Values inside a block stay resident only when backward has reached the block; replays for
other blocks free such values again. See Note [Made each time].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ebb._plan.profile.measuring import Measured
from ebb._plan.simulate.choice import Choice, Operators, policy_of
from ebb._plan.simulate.simulator import Simulator
from ebb._plan.simulate.step import Step
from ebb._policy.policy import Policy
from ebb.policies import save_all

_LENGTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)  # blocks in a group
_MOST_SHARES = 8  # for each length: how many different numbers of groups are tried


@dataclass(frozen=True)
class Stack:
    """Blocks that one module calls one after the other."""

    parent: str  # name of that module
    calls: tuple[range, ...]  # for each call of the module, its calls of blocks, in order
    # Values that a block made and a later block of the same call reads. Each has two indices. This
    # maps its index as the later block's input to its index as the earlier block's result.
    passed_on: Mapping[int, int]


def find_stacks(step: Step, parents: Mapping[str, str]) -> list[Stack]:
    """Stacks in a step whose blocks are regions of their own. `parents`: as in `Measured`."""
    runs: dict[str, list[range]] = {}
    for run in _runs(step, parents):
        if len(run) > 2:
            runs.setdefault(parents[step.calls[run.start].region], []).append(run)
    stacks = []
    for parent, calls in runs.items():
        passed_on: dict[int, int] = {}
        for run in calls:
            passed_on |= _passed_on(step, run)
        names = {tuple(step.calls[number].region for number in run) for run in calls}
        if passed_on and len(names) == 1:  # each call of the module calls the same blocks
            stacks.append(Stack(parent, tuple(calls), passed_on))
    return stacks


def _runs(step: Step, parents: Mapping[str, str]) -> Iterable[range]:
    """Consecutive calls of different blocks with the same parent."""
    start = 0
    for number in range(1, len(step.calls) + 1):
        names = [call.region for call in step.calls[start : number + 1]]
        goes_on = (
            number < len(step.calls)
            and len(set(names)) == len(names)
            and parents.get(names[-1]) == parents.get(names[0])
        )
        if not goes_on:
            if names[0] in parents:
                yield range(start, number)
            start = number


def _passed_on(step: Step, run: range) -> dict[int, int]:
    passed_on = {}
    last: dict[int, int] = {}  # the latest value in each memory
    for number in run:
        call = step.calls[number]
        for value in call.inputs:
            memory = step.memory_of.get(value)
            if memory in last and step.values[value].made >= step.values[last[memory]].made:
                passed_on[value] = last[memory]
        for op in call.operators:
            for value in step.operators[op].outputs:
                if value in step.memory_of:
                    last[step.memory_of[value]] = value
    return passed_on


class Stacked:
    """A step in which modules around stacks of blocks are regions. `measured`, `simulator` and
    `stacks` are those of the step in which blocks are regions."""

    def __init__(self, measured: Measured, simulator: Simulator, stacks: list[Stack]) -> None:
        self._blocks = simulator.step
        self._stacks = {stack.parent or measured.root: stack for stack in stacks}
        around = {
            number: (run.start, name)
            for name, stack in self._stacks.items()
            for run in stack.calls
            for number in run
        }
        self.simulator = simulator.copy(_joined(self._blocks, around, stacks))
        self.choices = {  # by the name of the module around the blocks
            name: list(_choices(self._blocks, stack)) for name, stack in self._stacks.items()
        }

    def policies(self, region: str, choice: Choice) -> dict[str, Policy] | None:
        """Policies of the module and its blocks; None if the region is no stack."""
        stack = self._stacks.get(region)
        if stack is None:
            return None
        run = stack.calls[0]
        first = self._blocks.calls[run.start].operators.start
        policies = {stack.parent: save_all}
        for number in run:
            call = self._blocks.calls[number]
            begin, count = call.operators.start - first, len(call.operators)

            def own(operators: Operators, begin: int = begin, count: int = count) -> Operators:
                return frozenset(op - begin for op in operators if 0 <= op - begin < count)

            policies[call.region] = policy_of(choice.mapped(own), self._blocks.names_of(number))
        return policies


def _joined(step: Step, around: Mapping[int, tuple[int, str]], stacks: Iterable[Stack]) -> Step:
    """The step in which the calls of each stack are one region."""
    passed_on = {value: maker for stack in stacks for value, maker in stack.passed_on.items()}
    values = list(step.values)
    for value, maker in passed_on.items():
        both = values[value], values[maker]
        first = min(
            (record for record in both if record.asked >= 0),
            key=lambda record: record.asked,
            default=both[0],
        )
        is_saved = any(record.saved for record in both)
        values[maker] = replace(values[maker], saved=is_saved, asked=first.asked, node=first.node)
    operators = [
        replace(
            operator,
            call=around[step.call_of[op]][0] if step.call_of[op] in around else -1 - operator.call,
            inputs=tuple(passed_on.get(value, value) for value in operator.inputs),
        )
        for op, operator in enumerate(step.operators)
    ]
    profile = replace(step.profile, operators=tuple(operators), values=tuple(values))
    released = [
        (maker, step.input_released(value))
        for value, maker in passed_on.items()
        if step.values[value].let_go >= 0
    ]
    return Step(profile, dict(around.values()), step, released)


def _choices(step: Step, stack: Stack) -> Iterable[Choice]:
    """Choices with groups of several lengths, of all blocks or the first ones."""
    run = stack.calls[0]
    first = step.calls[run.start].operators.start
    # By call: operators whose results a later block reads.
    outputs: dict[int, set[int]] = {number: set() for number in run}
    for value in stack.passed_on.values():
        maker = step.maker[value]
        if step.call_of[maker] in outputs:
            outputs[step.call_of[maker]].add(maker)
    results = {  # the parent module may save what blocks return to it
        op
        for op in range(first, step.calls[run[-1]].operators.stop)
        if any(step.values[value].fate == "result" for value in step.operators[op].outputs)
    }.difference(*outputs.values())
    inside = [
        op
        for number in run
        for op in step.calls[number].operators
        if op not in outputs[number] | results | step.always_kept
    ]
    for length in (length for length in _LENGTHS if length < len(run)):
        groups = len(run) // length
        shares = {groups * share // _MOST_SHARES for share in range(1, _MOST_SHARES + 1)} - {0}
        for grouped in sorted(shares):
            ends = {run.start + length * (group + 1) - 1 for group in range(grouped)}
            alone = {number for number in run if number >= run.start + length * grouped}
            saved = {op for number in ends | alone for op in outputs[number]} | results
            yield Choice(
                frozenset(op - first for op in saved),
                each_time=frozenset(op - first for op in inside),
            )
