"""Runs torch-remat with its fastest API: regions in the source code, around products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_remat  # type: ignore[import-untyped]
import workloads
from torch import Tensor
from workloads import Block

# torch-remat makes reads of a skipped product's placeholder raise, with a binding that only CUDA
# builds of torch have. No workload here reads a placeholder, so other builds get a binding that
# does nothing; this does not change the measured time.
if not hasattr(torch._C, "_set_storage_data_ptr_access_error_msg"):

    def stay_silent(storage_ptr: int, s: str) -> None:
        pass

    torch._C._set_storage_data_ptr_access_error_msg = stay_silent


class Remat:
    """Runs blocks in torch_remat.checkpoint.

    Makes the region of each product once per block, not once per call. The block's last product is
    neither replayed nor saved, since no replay needs it. Without this region torch-remat, which has
    no early stop, would replay it.

    Args:
        saves: called with a product's operator and its index among the block's products of that
            operator; True saves the product.
    """

    def __init__(self, saves: Callable[[str, int], bool]) -> None:
        self._saves = saves
        self._blocks: dict[Block, Callable[..., Tensor]] = {}

    def __call__(self, block: Block, *inputs: Tensor) -> Tensor:
        if block not in self._blocks:
            self._blocks[block] = self._checkpointed(block)
        return self._blocks[block](*inputs)

    def _checkpointed(self, block: Block) -> Callable[..., Tensor]:
        calls = _Calls(self._saves)

        def body(*inputs: Tensor) -> Tensor:
            calls.restart()
            with workloads.products_called_by(calls):
                return block(*inputs)

        checkpointed: Callable[..., Tensor] = torch_remat.checkpoint()(body)
        return checkpointed


class _Calls:
    """The products of one block, in the order of their calls."""

    def __init__(self, saves: Callable[[str, int], bool]) -> None:
        self._saves = saves
        self._plan: list[Callable[..., Any] | None] = []  # by product; None: it is replayed
        self._numbers: dict[str, int] = {}
        self._next = 0

    def restart(self) -> None:
        self._next = 0

    def __call__(
        self,
        operator: str,
        function: Callable[..., Tensor],
        *arguments: Tensor,
        last: bool = False,
    ) -> Tensor:
        index = self._next
        self._next += 1
        if index == len(self._plan):
            self._plan.append(self._region(index, operator, function, last))
        region = self._plan[index]
        if region is None:
            return function(*arguments)
        result: Tensor = region(*arguments)
        if not last:
            torch_remat.recompute_needs_tensor(result)
        return result

    def _region(
        self, index: int, operator: str, function: Callable[..., Tensor], last: bool
    ) -> Callable[..., Any] | None:
        number = self._numbers.get(operator, 0)
        self._numbers[operator] = number + 1
        if not (last or self._saves(operator, number)):
            return None
        region: Callable[..., Any] = torch_remat.region(
            function, f"{operator}.{index}", recompute=False
        )
        return region
