"""The processes of a job agree whether a step was valid; the error of an invalid step."""

from __future__ import annotations

import contextlib
import itertools
import json
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch.distributed as dist

from ebb import _C


class PageOverflowError(RuntimeError):
    """A page pool was too small for a tensor, so the gradients of this step are invalid.

    Raised in the step if ``overflow="blocking"``, and by an optimizer that is about to use such
    gradients. Clear the gradients and run the step again, or let :func:`run_step` do so.
    """

    __module__ = "ebb"  # the name for users and pickles


# Note [Ranks agree on a step]
# Ranks agree through the store of their process group, never by a collective. If the function
# raised on this rank, other ranks may wait in a collective that this rank did not reach. If this
# rank then started another collective in the group, the backend would match the two.
#
# In a meeting, each process reports if the step is valid so far, and reads the reports of all. Each
# run of a step's function has its own meetings, numbered from 0. A process joins a meeting:
#  1. before the first optimizer of the run steps;
#  2. when the function calls step_ok();
#  3. after the function has returned, repeatedly until all have returned. So ranks may differ in
#     the number of optimizers and of calls of step_ok().
# The last rank to arrive writes all reports to the store, where the others wait for them. A rank
# whose function raised reports this at its next meeting and does not wait; later meetings do not
# count it. The step runs again only if all ranks take part and no gradients have been used, that
# is, no meeting of kind 1 or 2 has found the step valid.
_OVERFLOW = "overflow"  # a pool was too small, and this process can run the step again
_BROKEN = "broken"  # paging failed, and this process cannot run the step again
_FAILED = "failed"  # the function raised an error unrelated to paging

USED = (
    "An optimizer inside run_step() had already stepped, or step_ok() had returned True, so the "
    "step cannot be run again, and some parameters may already be updated. Call run_step() once "
    "for each optimizer, with the forwards and backwards that belong to it."
)
_HALF_WAY = (
    "ebb: paging failed ({errors}), and the function passed to run_step() raised before it "
    "returned, so the step cannot be run again: other processes may wait in collectives that this "
    "process did not reach. Do not raise inside the function: check for non-finite gradients "
    "after run_step(), or after ebb.paging.step_ok() has returned True in all processes."
)

# The outcome of a meeting: True if some process has not finished its part of the run; and pairs of
# rank and error word.
Found = tuple[bool, list[tuple[int, str]]]
_FIELD = 20  # bits of each of three counts in one number: arrived, not finished, with an error


class _Peers:
    """The processes of a group, which communicate through the group's store."""

    def __init__(self, group: Any) -> None:
        store: Any = dist.distributed_c10d._get_process_group_store(group)
        if store is None:
            raise NotImplementedError(
                "ebb: ebb.paging.run_step() and step_ok() need a process group with a store, which "
                f"the backend {dist.get_backend(group)} does not have. Pass group=, a group "
                "with the backend gloo or nccl."
            )
        # Uses a separate connection, because a waiting connection blocks other threads.
        self._store: Any = dist.distributed_c10d.PrefixStore("ebb/paging", store.clone())
        self._store.set_timeout(store.timeout)  # some stores' clones lose the timeout
        self.size = dist.get_world_size(group)
        self.runs = itertools.count()
        self._rank = dist.get_rank(group)
        self._read: deque[str] = deque(maxlen=2)  # keys of this process's last meetings

    def arrive(self, key: str, expected: int, at_end: bool, word: str) -> Found | None:
        """Returns the outcome if all others have arrived. `word`: this process's error, if any."""
        if word:
            self._store.set(f"{key}/{self._rank}", word)
        total = self._store.add(key, 1 | (not at_end) << _FIELD | bool(word) << 2 * _FIELD)
        if total % 2**_FIELD == 1 and len(self._read) == 2:
            # All processes have joined the meeting before this one, so all have read the outcome of
            # the one before that.
            self._store.delete_key(self._read[0])
            self._store.delete_key(f"{self._read[0]}/found")
        if total % 2**_FIELD < expected:
            return None
        going_on = (total >> _FIELD) % 2**_FIELD > 0
        found = (going_on, self._said(key) if total >> 2 * _FIELD else [])
        self._store.set(f"{key}/found", json.dumps(found))
        return found

    def _said(self, key: str) -> list[tuple[int, str]]:
        keys = {rank: f"{key}/{rank}" for rank in range(self.size)}
        found = {rank: own for rank, own in keys.items() if self._store.check([own])}
        return [(rank, self._store.get(own).decode()) for rank, own in found.items()]

    def meet(self, key: str, expected: int, at_end: bool, word: str) -> Found:
        """Waits until all have arrived, and returns the outcome."""
        found = self.arrive(key, expected, at_end, word)
        if found is None:
            try:
                found = cast(Found, json.loads(self._store.get(f"{key}/found")))
            except RuntimeError as error:
                raise RuntimeError(
                    f"ebb: rank {self._rank} timed out: {self._arrived(key)} of {expected} "
                    "processes reached the check whether the step of ebb.paging is valid (the "
                    "timeout is init_process_group's). Likely causes: 1. a process does not call "
                    "run_step() or step_ok(), or has ended; 2. a process waits in a collective "
                    "that the function passed to run_step() calls after the optimizer. Move that "
                    "collective after run_step()."
                ) from error
        self._read.append(key)
        return found

    def _arrived(self, key: str) -> str:
        try:
            return str(self._store.add(key, 0) % 2**_FIELD)
        except RuntimeError:
            return "not all"


_peers: weakref.WeakKeyDictionary[Any, _Peers] = weakref.WeakKeyDictionary()  # by process group


def _peers_of(group: Any) -> _Peers | None:
    """None if this process is alone, or not in the group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0 or dist.get_world_size(group) == 1:
        return None
    if dist.get_backend(group) == "fake":  # this backend has no other processes
        return None
    if group not in _peers:
        _peers[group] = _Peers(group)
    return _peers[group]


def _errors() -> int:
    with contextlib.suppress(RuntimeError):  # the device may have failed
        return _C.paging_errors()
    return 0


class Agreement:
    """An agreement on one run of a step's function. See Note [Ranks agree on a step].

    Attributes:
        used: True if any process may have used the gradients.
        refusal: why the gradients are invalid; empty while no error is known.
    """

    def __init__(self, group: Any) -> None:
        self._peers = _peers_of(group)
        self._run = 0 if self._peers is None else next(self._peers.runs)
        self._meeting = 0
        self._absent = 0  # processes that have left the run
        self._is_final = False  # True: the step cannot be run again
        self.used = False
        self.refusal = ""

    @property
    def is_alone(self) -> bool:
        return self._peers is None

    def is_of(self, group: Any) -> bool:
        return self._peers is _peers_of(group)

    def ask(self, is_good: Callable[[], bool], at_end: bool = False) -> bool:
        """True if the step is valid so far, in all processes.

        Args:
            is_good: True if the step is valid in this process; raises RuntimeError if the step
                cannot be run again.
            at_end: True if this process has finished its part of the run.

        Returns:
            False if a pool was too small in some process, so that all run the step again.

        Raises:
            PageOverflowError: the step is not valid, and cannot be run again.
            RuntimeError: raised by `is_good`; or other processes did not reach the meeting in time.
        """
        going_on = True
        while going_on and not self.refusal:
            going_on = self._meet(is_good, at_end) and at_end
        if self._is_final:
            raise PageOverflowError(self.refusal)
        return not self.refusal

    def _meet(self, is_good: Callable[[], bool], at_end: bool) -> bool:
        """True if some process has not finished its part of the run."""
        try:
            word = "" if is_good() else _OVERFLOW
        except RuntimeError:
            self._exchange(at_end, _BROKEN)
            raise
        return self._exchange(at_end, word)

    def _exchange(self, at_end: bool, word: str) -> bool:
        if self._peers is None:
            going_on, said = not at_end, [(0, word)] if word else []
        else:
            going_on, said = self._peers.meet(*self._next_meeting(), at_end, word)
        self._absent += sum(word != _OVERFLOW for _, word in said)
        bad = [rank for rank, word in said if word != _FAILED]
        if bad:
            self._is_final = self.used or self._absent > 0
            self.refusal = self._describe(bad, any(word == _BROKEN for _, word in said))
        self.used |= going_on
        return going_on

    def _describe(self, ranks: list[int], is_broken: bool) -> str:
        where = "" if self.is_alone else f" on rank {', '.join(map(str, ranks))} of the group"
        if is_broken:
            return (
                f"ebb: paging failed{where}, and running the step again would not help. The "
                "gradients are invalid in all processes of the group; see the error of that rank."
            )
        what = f"ebb: a page pool was too small{where}, so the gradients of this step are invalid. "
        if self.used:
            return what + USED
        if self._absent:
            return what + (
                "The step cannot be run again, because another process has raised another error in "
                "it."
            )
        return what + "ebb.paging.run_step() catches this error and runs the step again."

    def _next_meeting(self) -> tuple[str, int]:
        assert self._peers is not None
        key = f"{self._run}/{self._meeting}"
        self._meeting += 1
        return key, self._peers.size - self._absent

    def leave(self) -> None:
        """Tell the other processes, without waiting, that this one joins no later meeting."""
        if self._peers is not None and not self.refusal:
            with contextlib.suppress(RuntimeError):  # the store may be gone
                word = _BROKEN if _errors() else _FAILED
                self._peers.arrive(*self._next_meeting(), True, word)

    @contextlib.contextmanager
    def leaving_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.leave()
            raise

    def runs_again_after(self, error: Exception) -> bool:
        """True if all processes run the step again although the function raised here.

        Raises:
            PageOverflowError: paging failed, and the step cannot be run again.
        """
        if self.refusal:
            return not self._is_final
        errors = _errors()
        self.leave()
        if not errors or (isinstance(error, PageOverflowError) and not self.is_alone):
            return False
        if not self.is_alone:
            with contextlib.suppress(RuntimeError):
                _C.paging_step_ok()  # marks the errors as reported to the user
            described = _C.describe_page_errors(errors)
            raise PageOverflowError(_HALF_WAY.format(errors=described)) from error
        return not self.ask(_C.paging_step_ok, at_end=True)
