"""Verify mode compares every replay, bit for bit, with the result of the forward."""

from __future__ import annotations

from contextlib import ExitStack

from ebb import _C
from ebb._support.layers import Layers
from ebb._support.shown import shown

_MODES = ("off", "raise", "demote")  # in the order of ebb::VerifyMode in C++
_layers = Layers(lambda modes: _C.set_verify_mode(modes["mode"]))


class ReplayMismatch(RuntimeError):
    """In verify mode, a recomputed value differs from the value of the forward.

    Attributes:
        region: the name of the region in which the difference begins.
        op: the first operator whose output differs, such as ``"aten::mul.Tensor"``.
        output: the output of ``op`` that differs, such as ``"result 0"``.
        largest_difference: the largest difference between an element of the forward's output and
            the same element of the replay's; infinity if one of them is NaN.
    """

    __module__ = "ebb"  # the name for users and pickles

    def __init__(
        self, message: str, region: str, op: str, output: str, largest_difference: float
    ) -> None:
        super().__init__(message)
        self.region = region
        self.op = op
        self.output = output
        self.largest_difference = largest_difference

    def __reduce__(self) -> tuple[object, ...]:
        return (
            ReplayMismatch,
            (str(self), self.region, self.op, self.output, self.largest_difference),
        )


class verify:
    """Switches verify mode on, in the whole process, for regions that are entered from now on.

    The call itself sets the mode; as a context manager, verify restores the earlier mode at the
    end. Blocks of several threads may overlap: the block that was entered last counts.

    In verify mode ebb recomputes each value that backward needs, even if its tensor is still alive,
    and compares it bit for bit with the forward's result. So ebb finds programs that write
    to tensors without torch's knowledge (see ``ebb.opaque``), and operators whose replay gives
    different results. ebb overwrites dropped memory before it frees it (NaN in floating-point
    tensors, bytes of 0xA5 in others), so that a stale raw pointer does not read correct data by
    accident. Verify mode is slow and needs the memory that regions otherwise free: use it to find
    errors, not to train.

    The environment variable ``EBB_VERIFY`` (``0``, ``1`` or ``demote``) sets the mode of a process.

    Args:
        mode: ``"raise"``: a difference raises ``ebb.ReplayMismatch`` in backward;
            ``"demote"``: ebb warns once per operator, uses the correct bytes, and saves that
            operator's outputs from then on; ``"off"``.

    Raises:
        ValueError: ``mode`` is none of these.

    Examples:
        >>> x = torch.ones(3, requires_grad=True)
        >>> with ebb.verify():
        ...     with ebb.region():
        ...         loss = (x * 2).sin().sum()
        ...     loss.backward()
    """

    def __init__(self, mode: str = "raise") -> None:
        if mode not in _MODES:
            raise ValueError(f"ebb: mode must be 'raise', 'demote' or 'off'; got {shown(mode)}")
        self._before = _C.set_verify_mode(_MODES.index(mode))
        self._undo = ExitStack()

    def __enter__(self) -> verify:
        _layers.add({"mode": self._before}, self._undo)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
