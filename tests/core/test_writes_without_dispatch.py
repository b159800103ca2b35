"""Methods of tensors and storages that can write where no operator shows it.

All methods are gone through. Those that are no operators are classified in tables here; a method
that torch adds fails a test until it is. Whatever the tables say, each method is called with many
arguments, and if that changes the bytes of a tensor computed in a region, gradients are eager's.
"""

from __future__ import annotations

import binascii
import contextlib
import itertools
import math
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ebb
from ebb import _C
from ebb_tests import fork_server
from ebb_tests.exactness import like_eager_each, same_bits
from ebb_tests.isolation import each_isolated
from ebb_tests.programs.unseen_writes import PROGRAMS, Write, outcome

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def ones() -> torch.Tensor:
    return torch.full((4,), 0.75, dtype=torch.float64)


def from_file(h: torch.Tensor) -> None:
    with tempfile.TemporaryFile() as file:
        ones().untyped_storage()._write_file(file, True, True, 8)
        file.seek(0)
        h.untyped_storage()._set_from_file(file, 0, True, 8)


def from_file_typed(h: torch.Tensor) -> None:
    with tempfile.TemporaryFile() as file:
        ones().untyped_storage()._write_file(file, True, True, 8)
        file.seek(0)
        h._typed_storage()._set_from_file(file, 0, True, 8)


# Every way that is known to write, by operators of which ebb is told or without.
WRITES: dict[str, Write] = {
    "Tensor.apply_": lambda h: h.apply_(lambda v: v * 3),
    "Tensor.map_": lambda h: h.map_(ones(), lambda a, b: a * 3 + b),
    "Tensor.map2_": lambda h: h.map2_(ones(), ones(), lambda a, b, c: a * 3 + b + c),
    "Tensor.apply_ to a view": lambda h: h[1:3].apply_(lambda v: v * 3),
    "Tensor.__setitem__": lambda h: h.__setitem__(slice(1, 3), 0.5),
    "UntypedStorage.byteswap": lambda h: h.untyped_storage().byteswap(torch.float64),
    "UntypedStorage._byteswap": lambda h: h.untyped_storage()._byteswap(8),
    "UntypedStorage.copy_": lambda h: h.untyped_storage().copy_(ones().untyped_storage()),
    "UntypedStorage.fill_": lambda h: h.untyped_storage().fill_(1),
    "UntypedStorage.__setitem__": lambda h: h.untyped_storage().__setitem__(6, 5),
    "UntypedStorage.__setitem__ of a slice":
        lambda h: h.untyped_storage().__setitem__(slice(5, 8), 5),
    "UntypedStorage.__getitem__, then fill_": lambda h: h.untyped_storage()[3:7].fill_(9),
    "UntypedStorage._set_from_file": from_file,
    "TypedStorage.copy_": lambda h: h._typed_storage().copy_(ones()._typed_storage()),
    "TypedStorage.fill_": lambda h: h._typed_storage().fill_(0.5),
    "TypedStorage.__setitem__": lambda h: h._typed_storage().__setitem__(1, 0.5),
    "TypedStorage._setitem": lambda h: h._typed_storage()._setitem(slice(1, 3), 0.5),
    "TypedStorage._set_from_file": from_file_typed,
}  # fmt: skip
if hasattr(torch.UntypedStorage, "_swap_data_ptr_"):  # new in torch 2.12
    WRITES |= {
        "UntypedStorage._swap_data_ptr_":
            lambda h: h.untyped_storage()._swap_data_ptr_(ones().untyped_storage()),
        "UntypedStorage._swap_data_ptr_, the other":
            lambda h: ones().untyped_storage()._swap_data_ptr_(h.untyped_storage()),
    }  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", WRITES)
@like_eager_each
def test_what_is_written_is_what_backward_sees(region, name, program):
    assert changes_bytes(WRITES[name])
    return outcome(region, program, WRITES[name])


@pytest.mark.parametrize("name", ["Tensor.apply_", "Tensor.map_", "Tensor.map2_"])
def test_after_the_region_a_write_to_what_was_saved_raises(name):
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    with ebb.region():
        h = x * 2
        loss = h.sin().sum()

    WRITES[name](h.detach())

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_writes_are_seen_after_other_code_has_restored_a_method(monkeypatch):
    def gradient(inside):
        x = torch.ones(4, dtype=torch.float64, requires_grad=True)
        with inside:
            h = x * 2
            before = h + 1
            before = before * before.exp()
            h.detach().untyped_storage()[3:7].fill_(9)
            loss = (before + h.sin() * x).sum()
        return torch.autograd.grad(loss, x)[0]

    expected = gradient(contextlib.nullcontext())
    with ebb.region():
        pass
    torchs = torch.UntypedStorage.__getitem__.__wrapped__
    monkeypatch.setattr(torch.UntypedStorage, "__getitem__", torchs)

    assert same_bits(gradient(ebb.region()), expected)


def test_ebb_replaces_no_method_of_torch_before_the_first_region():
    program = """
import torch
def replaced():
    now = vars(torch.UntypedStorage)
    return {name for name in now if now[name] is not before.get(name)}
before = dict(vars(torch.UntypedStorage))
import ebb
from ebb._region import unseen_writes
assert replaced() == set()
assert unseen_writes._watch_once.cache_info().currsize == 0
ebb.region()
assert "__getitem__" in replaced()
assert unseen_writes._watch_once.cache_info().currsize == 1
"""
    fork_server.run(["-c", program], check=True)


def test_replaced_methods_of_process_groups_are_told():
    program = """
import ebb, torch
backend = torch._C._distributed_c10d.Backend
torchs = backend.allreduce
backend.allreduce = lambda self, *args: torchs(self, *args)
ebb.region()
"""
    done = fork_server.run(["-c", program], check=True)
    assert "other code has replaced allreduce of torch.distributed's backends" in done.stderr


def test_subclasses_are_asked_as_before():
    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return func.__name__

    assert torch.ones(2).as_subclass(Asked).apply_(abs) == "apply_"


def test_methods_keep_their_documentation():
    for kind, name in ((torch.Tensor, "apply_"), (torch.UntypedStorage, "_byteswap")):
        assert getattr(kind, name).__name__ == name
    assert "Applies the function" in torch.Tensor.apply_.__doc__


def words(text: str) -> set[str]:
    return set(text.split())


# Attributes of torch.Tensor that are no operators, by what they can do to its memory.

# The memory is handed out to others, who may write to it: docs/guide/troubleshooting.md.
HANDS_OUT = words("""
    __array__ __cuda_array_interface__ __dlpack__ __dlpack_c_exchange_api__ const_data_ptr data_ptr
    numpy _typed_storage storage untyped_storage share_memory_ _cdata
""")
# Another storage takes the place of the tensor's: docs/limits.md.
REPLACES = {"__setstate__", "__delattr__", "__setattr__"}
# They write, by operators or announced to ebb: they are in WRITES, or Python for operators.
SEEN = words("""
    __iadd__ __idiv__ __ifloordiv__ __imod__ __imul__ __ipow__ __isub__ __itruediv__ __setitem__
    apply_ map_ map2_ module_load
""")
# They read, or make new tensors.
READS = words("""
    H T __abs__ __add__ __annotations__ __array_priority__ __array_wrap__ __bool__ __class__
    __complex__ __contains__ __deepcopy__ __delitem__ __dict__ __dir__ __div__ __dlpack_device__
    __doc__ __eq__ __firstlineno__ __float__ __floordiv__ __format__ __ge__ __getattribute__
    __getitem__ __getstate__ __gt__ __hash__ __index__ __init__ __init_subclass__ __int__ __invert__
    __iter__ __le__ __len__ __long__ __lt__ __matmul__ __mod__ __module__ __mul__ __ne__ __neg__
    __new__ __nonzero__ __pos__ __pow__ __radd__ __rand__ __rdiv__ __reduce__ __reduce_ex__ __repr__
    __reversed__ __rfloordiv__ __rlshift__ __rmatmul__ __rmod__ __rmul__ __ror__ __rpow__
    __rrshift__ __rsub__ __rtruediv__ __rxor__ __sizeof__ __static_attributes__ __str__ __sub__
    __subclasshook__ __torch_dispatch__ __torch_function__ __truediv__ __weakref__ _backward_hooks
    _base _clear_non_serializable_cached_data _dtensor__new__ _fix_weakref _grad _grad_fn
    _has_symbolic_sizes_strides _is_view _make_subclass _make_wrapper_subclass
    _post_accumulate_grad_hooks _python_dispatch _reduce_ex_internal _rev_view_func_unsafe
    _use_count _view_func _view_func_unsafe as_subclass backward bfloat16 bool byte cdouble cfloat
    char cpu cuda device dim_order double dtype eig element_size float grad grad_dtype grad_fn half
    int ipu is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized
    is_shared is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize layout long lstsq lu mtia
    name nbytes ndim ndimension nelement new new_tensor register_hook
    register_post_accumulate_grad_hook reinforce requires_grad shape short solve storage_type symeig
    to_sparse_coo tolist type unique volatile xpu
""")
# They read too: operators, which torch 2.11 does not list or torch 2.15 has no more.
READS |= words("""
    _has_grad_dtype_override _update_names cholesky dim get_device has_names is_contiguous names
    numel qr storage_offset
""")

STORAGE_WRITES = words("""
    __getitem__ __setitem__ _byteswap _set_from_file _swap_data_ptr_ byteswap copy_ fill_
    _setitem
""")
STORAGE_HANDS_OUT = words("""
    _cdata _data_ptr data_ptr share_memory_ _share_memory_ _share_cuda_ _share_fd_cpu_
    _share_filename_cpu_ _get_shared_fd
""")
# The storage gets other memory, or an object stands for another storage.
STORAGE_REPLACES = {"_resize_", "resize_", "_resize_with_addr_", "_set_cdata", "__setstate__"}
STORAGE_READS = words("""
    __annotations__ __class__ __copy__ __deepcopy__ __delattr__ __delitem__ __dict__ __dir__ __doc__
    __eq__ __firstlineno__ __format__ __ge__ __getattribute__ __getstate__ __gt__ __hash__ __init__
    __init_subclass__ __iter__ __le__ __len__ __lt__ __module__ __ne__ __new__ __reduce__
    __reduce_ex__ __repr__ __setattr__ __sizeof__ __static_attributes__ __str__ __subclasshook__
    __weakref__ _checkpoint_offset _deepcopy _dtype _element_size _expired _fake_device
    _fix_weakref _free_weak_ref _from_buffer _get_filename _get_legacy_storage_class _getitem
    _is_shared _maybe_wrap_index _nbytes _new_shared _new_shared_cuda _new_shared_fd_cpu
    _new_shared_filename_cpu _new_using_fd_cpu _new_using_filename_cpu _new_with_file
    _new_with_weak_ptr _new_wrapped_storage _pickle_storage_type _release_ipc_counter
    _release_ipc_counter_cuda _shared_decref _shared_incref _size _to _weak_ref _write_file
    bfloat16 bool byte char clone complex_double complex_float cpu cuda device double dtype
    element_size filename float float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
    from_buffer from_file get_device half hpu int is_cuda is_hpu is_pinned is_shared is_sparse
    is_sparse_csr long mps nbytes new pickle_storage_type pin_memory resizable short size to
    tolist type untyped
""")


def operators() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {n.removeprefix("aten::").partition(".")[0] for n in names if n.startswith("aten::")}


def attributes(kind: type) -> set[str]:
    """Those of a process that has imported torch and nothing that adds more, as backends do."""
    code = f"import torch; print(*dir(torch.{kind.__name__}))"
    return words(subprocess.check_output([sys.executable, "-c", code], text=True))


def test_every_attribute_of_tensors_is_classified():
    known = {*HANDS_OUT, *REPLACES, *SEEN, *READS, *operators()}
    assert attributes(torch.Tensor) - known == set()


@pytest.mark.parametrize("kind", [torch.UntypedStorage, torch.TypedStorage])
def test_every_attribute_of_storages_is_classified(kind):
    known = {*STORAGE_WRITES, *STORAGE_HANDS_OUT, *STORAGE_REPLACES, *STORAGE_READS}
    assert attributes(kind) - known == set()


def test_what_storages_write_with_is_among_the_writes():
    for kind in (torch.UntypedStorage, torch.TypedStorage):
        for name in STORAGE_WRITES & set(dir(kind)) - {"__getitem__"}:
            assert f"{kind.__name__}.{name}" in WRITES


# Whatever the tables say: all methods, called with what they may take.

# With arguments made up these crash, free memory that is in use, or change their arguments.
DANGEROUS = {
    "_set_cdata", "_resize_with_addr_", "_free_weak_ref", "_expired", "_new_with_weak_ptr",
    "_weak_ref", "_shared_incref", "_shared_decref", "_make_wrapper_subclass", "_make_subclass",
    "__class__", "_fix_weakref", "_new_with_file", "_new_using_filename_cpu", "_new_using_fd_cpu",
    "from_file", "__dlpack_c_exchange_api__", "_write_file", "_set_from_file", "__delitem__",
    "_swap_data_ptr_",
}  # fmt: skip


def argument_lists() -> Iterator[tuple[Any, ...]]:
    storage = ones().untyped_storage()
    indices = torch.tensor([0, 1, 1, 0])
    choices = (
        0, 0.5, ones(), storage, ones()._typed_storage(), slice(0, 4), indices, math.sqrt,
        lambda a, b: a + b, torch.tensor([True, False, True, False]), 1, (4,), "sum", 8,
    )  # fmt: skip
    yield from ((), *((choice,) for choice in choices))
    yield from itertools.product(choices[:7], choices[:9])
    yield from itertools.product((0, ones()), (indices, ones()), (*choices[:3], max))


def call_with(kind: type, name: str, args: tuple[Any, ...]) -> Write:
    def write(h: torch.Tensor) -> None:
        of_the_kind = {
            torch.Tensor: lambda: h,
            torch.UntypedStorage: h.untyped_storage,
            torch.TypedStorage: h._typed_storage,
        }
        getattr(of_the_kind[kind](), name)(*args)

    return write


def changes_bytes(write: Write) -> bool:
    h = torch.arange(1.0, 5.0, dtype=torch.float64) * 0.1
    before = h.numpy().tobytes()
    torch.manual_seed(0)
    with contextlib.suppress(Exception):
        write(h)
        same_tensor = h.shape == (4,) and h.dtype == torch.float64
        return same_tensor and h.numpy().tobytes() != before
    return False


Seen = tuple[bool, list[str]]  # whether a method has written, and the programs that were wrong


def try_method(job: tuple[type, str], tell: Callable[[int], None], skipped: frozenset[int]) -> Seen:
    """Calls a method until it has written with each number of arguments."""
    kind, name = job
    written: set[int] = set()
    wrong: list[str] = []
    warnings.simplefilter("ignore")
    for number, args in enumerate(argument_lists()):
        if len(args) in written or number in skipped:
            continue
        tell(number)
        write = call_with(kind, name, args)
        if changes_bytes(write):
            written.add(len(args))
            for program in PROGRAMS[:3]:
                regions = (contextlib.nullcontext(), ebb.region(ebb.policies.recompute_all))
                expected, actual = (outcome(region, program, write) for region in regions)
                if not all(map(same_bits, actual, expected)):
                    wrong.append(f"{kind.__name__}.{name} in {program.__name__}")
    return bool(written), wrong


def methods() -> list[tuple[type, str]]:
    return [
        (kind, name)
        for kind in (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)
        for name in sorted(set(dir(kind)) - DANGEROUS)
        if callable(getattr(kind, name, None))
    ]


def assert_exact_where_they_write(jobs: list[tuple[type, str]]) -> set[str]:
    """Returns which methods have written."""
    wrong, writing = [], set()
    for (kind, name), result, _ in each_isolated(jobs, try_method):
        assert result is not None, f"{name} crashes with too many arguments: is it dangerous?"
        if result[0]:
            writing.add(f"{kind.__name__}.{name}")
        wrong += result[1]
    assert wrong == []
    return writing


@pytest.mark.sweep
@pytest.mark.not_sanitized
def test_methods_that_are_no_operators_leave_gradients_as_they_are_where_they_write():
    jobs = [job for job in methods() if job[0] is not torch.Tensor or job[1] not in operators()]

    writing = assert_exact_where_they_write(jobs)

    assert {"Tensor.apply_", "UntypedStorage._byteswap", "TypedStorage.fill_"} <= writing


@pytest.mark.slow
@pytest.mark.not_sanitized
def test_all_methods_leave_gradients_as_they_are_where_they_write():
    writing = assert_exact_where_they_write(methods())

    assert {"Tensor.apply_", "Tensor.add_", "UntypedStorage._byteswap"} <= writing
    assert len(writing) > 130


def test_who_is_told_of_a_call_gets_the_names_of_its_arguments():
    told = []
    # A C function that gets keywords as an array of values and a tuple of names.
    assert _C.watch(
        binascii.b2a_uu, _C.Watch.TOLD, lambda *args, **named: told.append((args, named))
    )

    assert binascii.b2a_uu(b"a") == b"!80  \n"
    assert binascii.b2a_uu(b"\0", backtick=True) == b"!````\n"
    assert told == [((b"a",), {}), ((b"\0",), {"backtick": True})]
