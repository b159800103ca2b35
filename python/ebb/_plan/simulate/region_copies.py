"""Copies in one region. In: `Lifetimes`. Out: changes of memory, beside the memory of values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ebb._plan.simulate.changes import Changes, Span, during, highest
from ebb._plan.simulate.dataflow import EPSILON
from ebb._plan.simulate.lifetimes import Lifetimes
from ebb._plan.simulate.step import changes_of


def copies_of(lives: Lifetimes, beside: Mapping[int, list[Span]]) -> Iterable[tuple[float, int]]:
    """Times and changes in bytes of copies, and of other memory that replays need in addition.

    Args:
        beside: by memory that the program still holds with later contents: the times in which
            replayed contents need another allocation of the same size.
    """
    yield from _before_writes(lives)
    yield from _in_passing(lives)
    yield from _before_replayed_writes(lives)
    yield from _for_replays(lives)
    yield from changes_of(lives.step, beside)
    yield from _workspaces(lives)
    yield from _in_passing_ahead(lives)


def _workspaces(lives: Lifetimes) -> Iterable[tuple[float, int]]:
    for op, time in lives.replays.all():
        if (size := lives.step.workspace[op]) and (op, time) not in lives.replays.early:
            yield from during(time, time + EPSILON / 2, size)


def _in_passing_ahead(lives: Lifetimes) -> Iterable[tuple[float, int]]:
    """Temporary memory of replays ahead. Their timing beside the backward of another region is
    unknown, so their peak counts for the whole time."""
    step, replays = lives.step, lives.replays
    changes = []
    for op, time in replays.early:
        changes += during(time, time + EPSILON / 2, step.workspace[op])
        for value in step.operators[op].outputs:
            if value in step.memory_of and (op, time) in replays.passing:
                end = max(lives.replayed_until(value, op, time), time + EPSILON)
                changes += during(time, end, lives.size(value))
    most, _ = highest([Changes(changes)])
    if most > 0:
        begins = min(time for _, time in replays.early)
        yield from during(begins, lives.call.backward_begins, most)


def _before_writes(lives: Lifetimes) -> Iterable[tuple[float, int]]:
    """Copies of saved values and inputs that the program overwrites while a replay still needs
    them."""
    step, runs = lives.step, lives.replays.runs
    for op in lives.call.operators:
        for value in step.operators[op].outputs:
            writer = step.overwritten.get(value)
            if writer is None or op not in lives.kept:
                continue
            readers = [reader for reader in step.readers[value] if reader in runs]
            if readers:
                unpacked = [time for time, _ in lives.call.unpacked]
                end = max([lives.replays.last(readers) + EPSILON / 2, *unpacked])
                yield from during(step.operators[writer].start, end, lives.size(value))

    for copied in step.copied.get(step.call_of[lives.call.operators.start], ()):
        readers = [reader for reader in step.readers[copied.value] if reader in runs]
        if readers:
            end = lives.replays.last(readers) + EPSILON / 2
            yield from during(copied.allocated, end, copied.size)


def _in_passing(lives: Lifetimes) -> Iterable[tuple[float, int]]:
    """Copies of recomputed values that an operator of ``each_time`` overwrites. If the slice
    frees the operator's results, the replay writes to a copy, since a later replay will read
    the values again. If the slice keeps the results, the replay copies only if the
    overwritten values are needed after the slice. See Note [Made each time]."""
    step, runs = lives.step, lives.replays.runs
    for op in lives.each_time & runs.keys():
        for value in step.operators[op].inputs:
            maker = step.maker.get(value)
            if step.overwritten.get(value) != op or maker not in runs:
                continue
            for time in runs[op]:
                made = max((run for run in runs[maker] if run <= time), default=math.inf)
                if made == math.inf or (maker, made) in lives.replays.passing:
                    continue
                until = lives.replayed_until(value, maker, made)
                is_needed = until > lives.replays.ends[op, time]
                if (op, time) in lives.replays.passing or is_needed:
                    end = lives.memory_needed_until(op, time)
                    end = min(end, until) if is_needed else end
                    yield from during(time, max(end, time + EPSILON), lives.size(value))


def _before_replayed_writes(lives: Lifetimes) -> Iterable[tuple[float, int]]:
    """Copies of recomputed values that are still needed when another replay overwrites them.
    That replay writes through a tensor with its own version counter (a chunk of the same
    storage): autograd raises an error for any other write to a saved tensor."""
    step, runs = lives.step, lives.replays.runs
    for op in runs.keys() - lives.each_time:
        for value in step.operators[op].outputs:
            writer = step.overwritten.get(value)
            if writer not in runs or writer in lives.each_time:
                continue
            made, written = runs[op][0], runs[writer][0]
            until = lives.replayed_until(value, op, made)
            if until > lives.replays.ends[writer, written] and written > made:
                # From `both` on, only one of the two storages is needed.
                both = min(until, lives.memory_needed_until(writer, written))
                yield from during(written, max(written, both), lives.size(value))


def _for_replays(lives: Lifetimes) -> Iterable[tuple[float, int]]:
    """Copies of values that backward unpacks while operators that read them may still be
    recomputed. See Note [Unpacked bytes may be written]."""
    step = lives.step
    parameters = [  # computed inputs are not copied
        (step.values[value].asked, value)
        for value in step.inputs_of(lives.call)
        if value not in step.memory_of
    ]
    for time, value in [*lives.call.unpacked, *parameters]:
        readers = step.readers[value]
        last = lives.replays.last(readers)
        could_run = last > lives.slice_end(value, time) or any(
            lives.could_run(reader, time) for reader in readers if reader in lives.kept
        )
        if time >= 0 and could_run:
            is_replayed = step.maker.get(value) in lives.replays.runs
            end = max(step.replayed_until[value], last if is_replayed else 0.0)
            yield from during(time, end, step.values[value].memory)
