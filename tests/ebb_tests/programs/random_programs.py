"""Random programs: lists of instructions that a small interpreter runs, in eager or in regions.

A program is a list of instructions `(kind, a, b, c)` of small integers, the writes that follow the
forward, and a plan for backward. Every list of integers is a valid program: an operand picks among
the tensors that suit it (0: the youngest), and an instruction that finds none is skipped. So the
same data makes the same program in eager and under ebb, and shrinks well.

An instruction may raise, as in eager. The program continues, and the errors are compared.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

import ebb
from ebb_tests.engines import Engine, current
from ebb_tests.exactness import as_bytes, mark_all_rows, replayed

Instruction = tuple[int, int, int, int]


class Plan(NamedTuple):
    """Parameters of the backward."""

    way: int
    outputs: tuple[int, int, int]
    inputs: int
    alive: int  # selects the tensors that stay alive during backward


class Program(NamedTuple):
    wide: int  # odd: float64, even: float32
    begin: int  # index of the first instruction in a region
    policy: int  # selects the first region's policy
    body: list[Instruction]
    writes: list[Instruction]  # run after the forward
    plan: Plan


WAYS = ("grad",) * 8 + ("accumulate",) * 5 + ("one by one",) * 3 + ("twice", "double") * 4
WAYS += ("released",)  # two backwards, the first without retain_graph


CONDITIONS = [{}, {}, {"every": 2}, {"every": 3}, {"nth": 1}, {"nth": 2}]
CONDITIONS += [{"min_bytes": 40}, {"max_bytes": 100}, {"dtype": torch.float32}]
NAMES = ("a", "b")


def decisions(engine: Engine) -> list[ebb.Decision]:
    more = [ebb.SAVE, *[ebb.RECOMPUTE_EACH_TIME] * 4] if engine.each_time else []
    return [engine.keep, ebb.RECOMPUTE, ebb.RECOMPUTE, *more]


def random_policy(seed: int, engine: Engine) -> ebb.Policy:
    """A policy whose rules depend on the first letter of an operator's name, the count of its
    calls, the size and dtype of its result, or the result's `ebb.checkpoint_name`.
    """
    draw, of = random.Random(seed), decisions(engine)
    rules = [
        ebb.Rule(f"aten::{letter}*", draw.choice(of), **draw.choice(CONDITIONS))
        for letter in draw.sample("abcdefglmnprstuw_", 8)
    ]
    for name in NAMES:
        rule = ebb.Rule("*", draw.choice(of), name=name)
        rules.insert(draw.randrange(len(rules)), rule)
    if seed % 5 == 4:
        rules += random_policy(seed + 1001, engine).rules
    return ebb.Policy(rules, draw.choice(of))


@functools.cache
def choices(engine: Engine) -> list[ebb.Policy]:
    """The policies of regions."""
    policies = list(engine.policies.values())
    count = 200 if engine.each_time else 19
    return [*policies[:1] * 24, *policies, *(random_policy(seed, engine) for seed in range(count))]


BACKWARD = ("differentiate", "accumulate")


class Skip(Exception):
    """Raised if no tensor suits the instruction."""


class Record:
    """What the machine knows of one storage."""

    __slots__ = ("computed", "exposed")

    def __init__(self, computed: bool) -> None:
        self.computed = computed  # True if an operator inside a region made the storage
        self.exposed = False  # True if a region that could read it has ended


@dataclass(eq=False)
class Slot:
    """One tensor of the pool."""

    tensor: torch.Tensor
    storage: int
    record: Record
    own_counter: bool  # has another version counter than the first tensor of the storage
    swapped: bool = False  # has the version counter of a storage that the tensor had before


@dataclass
class Observation:
    """A result or an error that must be the same in eager and under ebb."""

    what: str
    seen: object
    message: str = ""
    refusable: bool = False


class Machine:
    def __init__(self, regions: bool, wide: bool, sees_all: bool = False) -> None:
        self.engine = current()
        self.with_regions = regions
        self.sees_all = sees_all  # see `touch`
        self.generator = torch.Generator(self.engine.device).manual_seed(5)
        self.dtype = torch.float64 if wide else torch.float32
        self.pool: list[Slot] = []
        self.records: dict[int, Record] = {}
        self.open: list[ebb.region | None] = []
        self.observed: list[Observation] = []
        self.refusable = False  # see `touch`
        self.recorded_backward = False  # True if some backward ran with create_graph
        self.entered = False  # True after the first region has begun
        self.replays = 0
        self.failures = 0  # count of failed allocations
        self.findings: list[str] = []  # errors that the test device reports
        self.halted = False  # a backward raised, which ends the program
        self.no_grad = self.autocast = 0  # number of following instructions in this mode
        self.streams: list[torch.Stream] = []
        if self.engine.is_on_device:
            default = torch.accelerator.current_stream(self.engine.device)
            self.streams = [default, *(torch.Stream(device=self.engine.device) for _ in range(2))]
        self.inputs = self.make_inputs()

    def make_inputs(self) -> list[torch.Tensor]:
        draw = {"generator": torch.Generator("cpu").manual_seed(7), "device": "cpu"}
        shapes = [(3, 4), (4, 4), (4,), (2, 3, 4), (3,), (3, 4), (3, 1)]
        drawn = [torch.randn(s, dtype=self.dtype, **draw).mul_(0.7) for s in shapes]
        inputs = [tensor.to(self.engine.device) for tensor in drawn]
        for tensor in inputs[:5]:
            tensor.requires_grad_()
        mean, var = torch.zeros(4, dtype=self.dtype), torch.ones(4, dtype=self.dtype)
        inputs += [mean, var, torch.tensor([2, 0, 1]), torch.tensor(1.5, dtype=self.dtype)]
        for tensor in reversed(inputs):
            self.push(tensor)
        return inputs

    # The pool of tensors that later instructions may use.

    def push(self, tensor: object, like: Slot | None = None, own_counter: bool = False) -> None:
        """Adds a tensor, or the first three of a list. They may be views of `like`."""
        if isinstance(tensor, (tuple, list)):
            for element in tensor[:3]:
                self.push(element, like, own_counter)
            return
        if not isinstance(tensor, torch.Tensor):
            return
        storage = tensor.untyped_storage()._cdata
        record = self.records.get(storage)
        if record is None:
            record = self.records[storage] = Record(bool(self.open))
        elif like is not None and like.storage == storage:
            own_counter |= like.own_counter
        self.pool.append(Slot(tensor, storage, record, own_counter))

    def drop(self, slots: list[Slot]) -> None:
        inputs = {id(tensor) for tensor in self.inputs}
        gone = {id(slot) for slot in slots if id(slot.tensor) not in inputs}
        self.pool = [slot for slot in self.pool if id(slot) not in gone]
        left = {slot.storage for slot in self.pool}
        for slot in slots:
            if slot.storage not in left:
                self.records.pop(slot.storage, None)

    def slot(self, operand: int, suits: Callable[[torch.Tensor], bool]) -> Slot:
        """Picks a suitable tensor: operand 0 picks the newest; most operands pick a new one."""
        suiting = [slot for slot in reversed(self.pool) if suits(slot.tensor)]
        if not suiting:
            raise Skip
        if operand % 4:
            suiting = [slot for slot in suiting if slot.tensor.requires_grad] or suiting
        return suiting[len(suiting) * operand**4 >> 32]

    def pick(self, operand: int, suits: Callable[[torch.Tensor], bool]) -> torch.Tensor:
        return self.slot(operand, suits).tensor

    def map(self, operand: int, suits: Callable, function: Callable, own: bool = False) -> None:
        source = self.slot(operand, suits)
        self.push(function(source.tensor), source, own)

    def input_slot(self, operand: int) -> Slot:
        wanted = self.inputs[operand % len(self.inputs)]
        if not wanted.is_floating_point() or wanted.dim() == 0:
            raise Skip
        return next(slot for slot in self.pool if slot.tensor is wanted)

    def rebind(self, tensor: torch.Tensor) -> None:
        """Notes that `tensor` got another storage, whose first tensor has another counter."""
        storage = tensor.untyped_storage()._cdata
        record = Record(bool(self.open))
        for slot in self.pool:
            if slot.tensor is tensor:
                slot.storage, slot.record = storage, record
                slot.own_counter = slot.swapped = True
        held = {slot.storage for slot in self.pool}
        self.records = {key: value for key, value in self.records.items() if key in held}
        self.records[storage] = record

    def touch(self, slot: Slot, silent: bool = False, unseen: bool = False) -> None:
        """Called before each write. Raises Skip if ebb need not notice the write.

        If the storage may be read by the replays of an ended region, ebb may refuse this write
        (`refusable`). Skipped are writes to such a storage that move no version that ebb reads:

        * to a tensor that the region computed (a shortcoming, see docs/shortcomings.md);
        * on a device, to a tensor from outside: ebb takes fingerprints only on the CPU;
        * outside of regions, if the value may have been offloaded or paged already.

        With `sees_all`, also skips writes outside of regions to storages that an ended region could
        read, and writes by code other than operators (`unseen`).
        """
        if self.sees_all and (unseen or (slot.record.exposed and not self.open)):
            raise Skip
        self.refusable |= slot.swapped  # ebb sees a write to the old storage
        if slot.record.exposed:
            if silent and (slot.record.computed or self.engine.is_on_device):
                raise Skip
            if (silent or slot.own_counter) and not self.open and self.engine.keep != ebb.SAVE:
                raise Skip
            if slot.record.computed and slot.own_counter:
                raise Skip
            self.refusable = True

    def touch_gradients(self) -> None:
        """Called before a backward that adds to `.grad`, a write to a tensor of the pool."""
        for t in self.inputs:
            record = t.grad is not None and self.records.get(t.grad.untyped_storage()._cdata)
            self.refusable |= bool(record and record.exposed)

    # Entering and leaving regions.

    def enter(self, choice: int) -> None:
        if len(self.open) == 3:
            raise Skip
        self.entered = True
        region = None
        if self.with_regions:
            if not self.open:  # outside of regions, so reset the counts
                self.replays += replayed()
                ebb.reset_stats()
            region = ebb.region(
                choices(self.engine)[choice % len(choices(self.engine))], f"r{len(self.open)}"
            )
            region.__enter__()
            if self.engine.pages:
                mark_all_rows(slot.tensor for slot in self.pool)
        self.open.append(region)

    def leave(self) -> None:
        if not self.open:
            raise Skip
        region = self.open.pop()
        if region is not None:
            region.__exit__(None, None, None)
        if not self.open:
            for slot in self.pool:
                slot.record.exposed = True

    # Running instructions and observing their results.

    def step(self, what: str, function: Callable[[], object]) -> bool:
        """Runs `function` and observes what it returns or raises."""
        try:
            seen, message = function(), ""
        except Skip:
            seen, message = "skipped", ""
        except Exception as error:
            seen, message = type(error).__name__, str(error)
        self.observed.append(Observation(what, seen, message, self.refusable))
        return not message

    def execute(self, index: int, instruction: Instruction, kinds: list[Callable]) -> None:
        if self.halted:
            return
        kind, a, b, c = instruction
        do = kinds[kind % len(kinds)]
        self.no_grad, self.autocast = max(self.no_grad - 1, 0), max(self.autocast - 1, 0)
        with (
            torch.set_grad_enabled(self.no_grad == 0),
            torch.autocast(
                torch.device(self.engine.device).type, torch.bfloat16, enabled=self.autocast > 0
            ),
        ):
            done = self.step(f"{index} {do.__name__}", lambda: do(self, a, b, c))
        self.halted |= not done and do.__name__ in BACKWARD

    def observe_tensors(self, what: str, tensors: list[torch.Tensor | None]) -> None:
        seen = [t if t is None else snapshot(t) for t in tensors]
        self.observed.append(Observation(what, seen, refusable=self.refusable))

    def observe_state(self, what: str) -> None:
        if self.halted:
            return
        self.observe_tensors(f"tensors {what}", [slot.tensor for slot in self.pool])
        self.observe_tensors(f"inputs {what}", self.inputs)
        self.observe_tensors(f"gradients {what}", [t.grad for t in self.inputs])
        states = [torch.get_rng_state(), self.generator.get_state()]
        if self.engine.is_on_device:
            states += [torch.late.get_rng_state(device) for device in range(2)]
        self.observe_tensors(f"random state {what}", states)

    # The backward after all instructions.

    def attempt(self, what: str, function: Callable[[], object]) -> None:
        if not self.halted:
            self.halted = not self.step(what, function)

    def backward(self, plan: Plan, between: Callable[[], None]) -> None:
        """Computes gradients as `plan` says. `between` writes before a second backward."""
        reachable = [slot for slot in reversed(self.pool) if slot.tensor.requires_grad]
        computed = [slot for slot in reachable if slot.tensor.grad_fn is not None]
        if not computed:
            raise Skip
        wanted = [t for t in self.inputs if t.requires_grad]
        wanted = [t for i, t in enumerate(wanted) if plan.inputs >> i & 5 != 5] or wanted
        if plan.inputs > 200:
            wanted.append(reachable[plan.inputs % len(reachable)].tensor)
        draw = {"generator": torch.Generator("cpu").manual_seed(3), "device": "cpu"}
        if plan.alive % 4 == 0:  # backward from some outputs, which stay alive
            chosen = sorted({len(computed) * o**2 >> 16 for o in plan.outputs})
            slots = [computed[i] for i in chosen]
            outputs = [slot.tensor for slot in slots]
            weights = [torch.rand(o.shape, **draw).add(0.5).to(o.device, o.dtype) for o in outputs]
            self.drop([s for s in self.pool if plan.alive % 8 == 0 and s not in slots])
        else:  # backward from losses of many outputs; the pool is freed
            mask = plan.outputs[0] | plan.outputs[1] ^ 255
            slots = [slot for i, slot in enumerate(computed) if mask >> i % 8 & 1] or computed[:1]
            outputs = [slot.tensor.mul(0.1 + i).sum() for i, slot in enumerate(slots)]
            weights = [torch.ones_like(o) for o in outputs]
            self.drop(list(self.pool))
        del reachable, computed, slots
        self.differentiate(WAYS[plan.way % len(WAYS)], outputs, wanted, weights, between)

    def differentiate(self, way, outputs, wanted, weights, between) -> None:
        def grad(what: str, **options: bool) -> list[torch.Tensor]:
            found: list[torch.Tensor | None] = []

            def call() -> list[tuple | None]:
                found.extend(
                    torch.autograd.grad(outputs, wanted, weights, allow_unused=True, **options)
                )
                return [g if g is None else snapshot(g) for g in found]

            self.attempt(what, call)
            return [g for g in found if g is not None and g.requires_grad]

        if way == "accumulate":
            self.touch_gradients()
            self.attempt("backward", lambda: torch.autograd.backward(outputs, weights))
        elif way == "one by one":
            for output, weight in zip(outputs, weights, strict=True):
                self.touch_gradients()
                self.attempt("backward", lambda o=output, w=weight: o.backward(w, True))
        elif way in ("twice", "released"):
            grad("backward", retain_graph=way == "twice")
            between()
            grad("second backward")
        elif way == "double":
            self.recorded_backward = True
            outputs = grad("backward", create_graph=True)
            weights = [torch.ones_like(g) for g in outputs]
            between()
            if outputs:
                grad("double backward")
        else:
            grad("backward")


@torch.no_grad()
def snapshot(t: torch.Tensor) -> tuple:
    return tuple(t.shape), t.dtype, t.requires_grad, as_bytes(t).numpy().tobytes()
