"""Arguments for any operator that torch's dispatcher knows, made from its schema.

The values are guesses: a call that raises says nothing about the operator. Each attempt draws
everything from a generator of its own, so a call can be made again by its number.
"""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

Schema = Any  # torch._C.FunctionSchema
Named = dict[str, Any]

# Dispatch keys of kernels for tensors in the CPU's memory.
BACKENDS = ("CPU", "QuantizedCPU", "MkldnnCPU", "SparseCPU", "SparseCsrCPU", "NestedTensorCPU")

SHAPES = (
    (2, 3), (3,), (3, 3), (2, 4, 4, 4), (), (4,), (2, 3, 4), (4, 4), (2, 4, 3, 3), (8, 8), (1,),
    (2, 4, 3, 3, 3), (2, 4, 4, 4, 4), (16,), (2, 2, 2), (16, 16), (64, 64), (2, 4, 8, 8), (4, 4, 4),
)  # fmt: skip
DTYPES = (
    torch.float32, torch.float32, torch.float32, torch.float64, torch.int64, torch.bool,
    torch.complex64, torch.int32, torch.bfloat16, torch.uint8, torch.int8, torch.float16,
)  # fmt: skip
INDEX_NAMES = ("ind", "target", "offset", "idx", "label", "repeats", "crow", "col", "batch_sizes")
SIZE_NAMES = ("size", "shape", "normalized_shape", "sizes", "self_size", "input_sizes")
MASK_NAMES = ("mask", "condition", "cond")
STRINGS = (
    "sum", "none", "mean", "floor", "trunc", "linear", "ij", "L", "right", "zeros", "tanh", "valid",
    "reduce", "mm", "ijk", "same", "nearest", "fro", "reflect", "prod", "gels", "U",
)  # fmt: skip

# Their kernels check neither the lengths of lists nor shapes, and would write outside of a tensor.
UNCHECKED = ("fused_adam", "fused_adamw", "fused_adagrad", "fused_sgd")

STRINGS_BY_NAME = {
    "reduce": ("add", "multiply", "sum", "prod", "mean", "amax", "amin"),
    "padding": ("valid", "same"),
    "rounding_mode": ("floor", "trunc"),
    "attr": ("none", "relu", "tanh"),
    "binary_attr": ("add", "sum", "mul"),
    "unary_attr": ("relu",),
    "post_op_name": ("none", "relu"),
    "unary_post_op": ("none", "relu"),
    "binary_post_op": ("sum", "add"),
    "algorithm": ("none", ""),
    "driver": ("gels", "gelsy"),
    "mode": ("nearest", "constant", "reflect"),
    "side": ("left", "right"),
    "UPLO": ("L", "U"),
    "ord": ("fro", "nuc"),
}


@functools.cache
def schemas() -> dict[str, Schema]:
    """All schemas by the dispatcher's names, such as "aten::add.out" and "aten::relu"."""
    known = set(torch._C._dispatch_get_all_op_names())
    spelt = {
        s.name + (f".{s.overload_name}" if s.overload_name else ""): s
        for s in torch._C._jit_get_all_schemas()
    }
    return {name: spelt[name] for name in sorted(known)}


def overload(name: str) -> Callable[..., Any]:
    space, _, rest = name.partition("::")
    base, _, variant = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), base), variant or "default")


def runs_on_the_cpu(name: str) -> bool:
    """True if a call with CPU tensors, or without tensors, reaches a kernel."""
    has = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    own = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has(name, key) for key in BACKENDS) or own(name, "BackendSelect")


def writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def base_of(name: str) -> str:
    """The name that all variants of an operator share: "add" for "aten::add_.Tensor"."""
    base = name.partition("::")[2].partition(".")[0].strip("_")
    for suffix in ("_copy", "_functional", "_out", "_legit"):
        base = base.removesuffix(suffix)
    return base


LAYOUTS_BY_KEY = {
    "QuantizedCPU": ("quantized", "per_channel"),
    "MkldnnCPU": ("mkldnn",),
    "SparseCPU": ("coo",),
    "SparseCsrCPU": ("csr", "csc", "bsr"),
    "NestedTensorCPU": ("nested",),
}


@functools.cache
def layouts_of(base: str) -> tuple[str, ...]:
    """The layouts for which a variant of the operator has a kernel."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return tuple(
        layout
        for key, layouts in LAYOUTS_BY_KEY.items()
        if any(has(name, key) for name in variants()[base])
        for layout in layouts
    )


@functools.cache
def variants() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in schemas():
        found.setdefault(base_of(name), []).append(name)
    return found


class Guess:
    """One guess of arguments. Most tensors have one common shape and dtype; some differ.

    Args:
        name: an operator.
        number: the number of the guess, which seeds all random choices.
        examples: arguments by name of calls to variants of the operator that succeeded.
    """

    def __init__(self, name: str, number: int, examples: list[Named] = []) -> None:  # noqa: B006
        self.schema = schemas()[name]
        self.random = random.Random(zlib.crc32(f"{name} {number}".encode()))
        self.source = torch.Generator().manual_seed(self.random.getrandbits(32))
        self.number = number
        self.shape = self.one_of(SHAPES[:4] if number % 3 == 1 else SHAPES)
        self.dtype = torch.float32 if number % 3 else self.one_of(DTYPES)
        self.layout = self.layout_for(name) if number % 2 else ""
        self.count = self.one_of((1, 2, 2, 3, 4))  # length of lists of tensors
        self.unchecked = base_of(name) in UNCHECKED
        self.strict = self.unchecked or number % 5 < 2  # all tensors have one shape and dtype
        self.daring = number % 4 == 3  # also guesses arguments that have a default
        self.example: Named = {}
        if examples and number % 5 and not self.unchecked:
            self.example = examples[number % len(examples)]
            self.follow(self.example)

    def one_of(self, choices: Any) -> Any:
        return self.random.choice(tuple(choices))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def layout_for(self, name: str) -> str:
        fitting = layouts_of(base_of(name))
        if name.startswith("quantized::"):
            fitting = (*fitting, "quantized", "per_channel")
        return self.one_of(fitting) if fitting and self.chance(0.7) else ""

    def follow(self, example: Named) -> None:
        tensors = [t for t in example.values() if isinstance(t, torch.Tensor)]
        if tensors:
            self.shape, self.dtype = tuple(tensors[0].shape), tensors[0].dtype
            self.layout = ""

    def arguments(self) -> tuple[list[Any], Named]:
        args, kwargs = [], {}
        for argument in self.schema.arguments:
            if argument.has_default_value() and not self.wants_more_than_the_default(argument):
                if not argument.kwarg_only:
                    args.append(argument.default_value)
                continue
            value = self.value_of(argument)
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return args, kwargs

    def wants_more_than_the_default(self, argument: Any) -> bool:
        if argument.name in ("layout", "device", "pin_memory", "memory_format"):
            return False
        known = self.example.get(argument.name)
        if known is not None or writes(argument):
            return True
        flag = argument.type.kind() == "BoolType"
        return self.chance(0.5) if flag else self.daring and self.chance(0.5)

    def value_of(self, argument: Any) -> Any:
        kind = argument.type.kind()
        if argument.name in self.example and not argument.is_out:
            known = copy_of(self.example[argument.name])
            if isinstance(known, bool) and self.chance(0.3):
                return not known
            if known is not None or not self.chance(0.3):
                return known
        if argument.is_out and kind == "TensorType":
            dtype = self.dtype if self.chance(0.6) else self.one_of(DTYPES)
            if self.layout and self.chance(0.6):
                return with_layout(self.draw(self.shape, self.dtype), self.layout)
            return torch.empty(0, dtype=dtype)
        return self.value(argument.type, argument.name, argument.N)

    def value(self, kind: Any, name: str, size: int | None = None) -> Any:
        match kind.kind():
            case "OptionalType":
                return None if self.chance(0.4) else self.value(kind.getElementType(), name, size)
            case "TensorType":
                return self.tensor(name)
            case "ListType":
                return self.list_of(kind.getElementType(), name, size)
            case "IntType" | "SymIntType":
                return self.integer(name)
            case "BoolType" | "SymBoolType":
                return self.chance(0.5)
            case "FloatType" | "SymFloatType":
                return self.one_of((0.5, 1.0, 0.25, 1e-3, 0.9))
            case "NumberType" | "ScalarTypeType":
                return self.one_of((0.5, 1, 2, 0.25, 0.75))
            case "StringType":
                return self.one_of(STRINGS_BY_NAME.get(name, STRINGS))
            case "DeviceObjType":
                return torch.device("cpu")
            case "GeneratorType":
                return torch.Generator().manual_seed(3)
            case "StorageType":
                return torch.rand(self.shape).untyped_storage()
            case "ClassType":
                return packed(kind.annotation_str, self.one_of)
            case other:
                raise NotImplementedError(f"no value for {other}")

    def list_of(self, kind: Any, name: str, size: int | None) -> list[Any]:
        if kind.kind() in ("IntType", "SymIntType", "FloatType", "BoolType"):
            if kind.kind() != "BoolType" and name in SIZE_NAMES and not (size and size > 1):
                return list(self.shape)
            if "stride" in name and len(name) == 6 and not size:
                return list(torch.empty(self.shape).stride())
            spatial = max(1, len(self.shape) - 2)
            count = (
                size if size and size > 1 else self.one_of((spatial, spatial, len(self.shape), 1))
            )
            if name in ("dims", "dim", "axes") and not size:
                return list(range(self.one_of(range(len(self.shape) + 1))))
            one = self.value(kind, name)
            return [one if self.chance(0.7) else self.value(kind, name) for _ in range(count)]
        one_length = self.unchecked or self.chance(0.9)
        count = size or (self.count if one_length else self.one_of((1, 2, 3)))
        return [self.value(kind, name) for _ in range(count)]

    def integer(self, name: str) -> int:
        if name in ("dtype", "out_dtype", "acc_dtype", "output_dtype"):
            return self.one_of((6, 7, 4, 13, 12))  # dtype codes: float, double, long, quint8, qint8
        if "dim" in name or "axis" in name:
            return self.one_of((0, 0, -1, 1))
        if "zero_point" in name:
            return self.one_of((0, 1, 3))
        if name in ("groups", "step", "dilation", "stride"):
            return 1
        if "quant_min" in name:
            return 0
        if "quant_max" in name:
            return 255
        return self.one_of((1, 1, 0, 2, 3, 4, -1, 8))

    def tensor(self, name: str) -> torch.Tensor:
        lowered = name.lower()
        shape = self.shape if self.strict or self.chance(0.75) else self.one_of(SHAPES)
        if any(part in lowered for part in INDEX_NAMES) and self.chance(0.85):
            dtype = torch.int64 if self.chance(0.7) else torch.int32
            return self.draw(shape if self.chance(0.5) else shape[:1] or (2,), dtype) % 2
        if any(part in lowered for part in MASK_NAMES) and self.chance(0.7):
            return self.draw(shape, torch.bool)
        if lowered in ("weight", "bias", "running_mean", "running_var", "mean", "invstd", "rstd",
                       "save_mean", "save_invstd", "save_var") and self.chance(0.5):  # fmt: skip
            channels = self.shape[1] if len(self.shape) > 1 else 1
            return self.draw((channels,), torch.float32) + 0.1
        if lowered in ("lr", "scalars", "found_inf", "grad_scale", "inv_scale", "growth_tracker"):
            count = self.count if lowered == "scalars" else 1
            number = self.draw((count,) if lowered == "scalars" else (), torch.float32)
            return number.int() if lowered == "growth_tracker" else number
        if "state_steps" in lowered:
            return self.draw((), torch.float32)
        if "scale" in lowered or "zero_point" in lowered:
            whole = torch.int32 if "zero" in lowered else torch.float32
            width = self.one_of(((), (1,), self.shape[:1]))
            return self.draw(width, whole) % 3 + (1 if whole is torch.float32 else 0)
        if self.layout and self.chance(0.75):
            return with_layout(self.draw(shape, self.dtype), self.layout)
        keeps = self.strict or self.chance(0.85)
        return self.draw(shape, self.dtype if keeps else self.one_of(DTYPES))

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Numbers in (0, 1), or integers from 1 to 3: most functions accept these."""
        numbers = torch.rand(shape, generator=self.source) * 0.9 + 0.05
        if dtype == torch.bool:
            return numbers > 0.4
        if dtype.is_floating_point or dtype.is_complex:
            return numbers.to(dtype)
        return (numbers * 3 + 1).to(dtype)


def with_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    match layout:
        case "coo":
            return x.to_sparse()
        case "csr":
            return x.to_sparse_csr()
        case "csc":
            return x.to_sparse_csc()
        case "bsr":
            return x.to_sparse_bsr((1, 1))
        case "nested":
            return torch.nested.nested_tensor([x, x * 2])
        case "mkldnn":
            return x.float().to_mkldnn()
        case "quantized":
            kind = torch.quint8 if x.numel() % 2 else torch.qint8
            return torch.quantize_per_tensor(x.float(), 0.1, 0, kind)
        case "per_channel":
            scales = torch.rand(x.shape[0]) + 0.1
            zeros = torch.zeros(x.shape[0], dtype=torch.int64)
            return torch.quantize_per_channel(x.float(), scales, zeros, 0, torch.qint8)
    raise ValueError(layout)


def packed(kind: str, one_of: Callable[[Any], Any]) -> Any:
    """An object of the class `kind`, such as a packed weight."""
    q = torch.ops.quantized

    def weight(*shape: int) -> torch.Tensor:
        return torch.quantize_per_tensor(torch.rand(shape), 0.1, 0, torch.qint8)

    name = kind.rpartition(".")[2]
    if "LinearPacked" in name:
        out_of, into = one_of((3, 4, 2, 16)), one_of((3, 4, 2, 16))
        if ".sparse." in kind:
            return torch.ops.sparse.qlinear_prepack(weight(out_of, into), None, 1, 4)
        if one_of((True, False)):
            return q.linear_prepack_fp16(torch.rand(out_of, into), torch.rand(out_of))
        return q.linear_prepack(weight(out_of, into), torch.rand(out_of))
    if "ConvPacked" in name or name.startswith(("Conv2d", "Conv3d")):
        dims = 3 if "3d" in name else 2
        channels, transposed = one_of((3, 4, 2)), one_of((False, False, True))
        prepack = getattr(q, f"conv{'_transpose' if transposed else ''}{dims}d_prepack")
        ones, zeros = [1] * dims, [0] * dims
        extra = (zeros,) if transposed else ()
        w = weight(channels, channels, *ones)
        return prepack(w, torch.rand(channels), ones, zeros, *extra, ones, 1)
    if "EmbeddingPacked" in name:
        scales, zeros = torch.rand(8) + 0.1, torch.rand(8)
        w = torch.quantize_per_channel(torch.rand(8, 4), scales, zeros, 0, torch.quint8)
        return q.embedding_bag_prepack(w)
    if "CellParamsBase" in name:
        width = one_of((3, 4))
        gates = one_of((4, 3)) * width
        w = q.linear_prepack(weight(gates, width), torch.rand(gates))
        return q.make_quantized_cell_params_dynamic(
            w, w, torch.rand(gates), torch.rand(gates), True
        )
    if "_RecordFunction" in name:
        return torch.ops.profiler._record_function_enter_new("name", None)
    if name == "ConvOpContext":
        return torch.ops.mkldnn_prepacked.conv2d_prepack(
            torch.rand(3, 3, 1, 1), None, [1, 1], [0, 0], [1, 1], 1, [2, 3, 4, 4], "none"
        )
    raise NotImplementedError(f"no value for {kind}")


def copy_of(value: Any) -> Any:
    """A copy of the arguments. Copies whole storages, so that views keep their geometry."""
    if isinstance(value, torch.Tensor):
        return copy_of_tensor(value)
    if isinstance(value, list | tuple):
        return type(value)(copy_of(v) for v in value) if type(value) in (list, tuple) else value
    return value


def copy_of_tensor(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    if x.layout != torch.strided or x.is_nested or x.is_quantized or type(x) is not torch.Tensor:
        return x.clone()
    if x.is_conj() or x.is_neg() or not x.untyped_storage().nbytes():
        return x.clone()
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage().clone())
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]


def parts_of(x: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that hold a tensor's contents: indices, values and so on."""
    if x.is_nested and x.layout is torch.jagged:
        return [x.values()]
    if x.layout is torch.sparse_coo:
        return [x._indices(), x._values()]
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [x.crow_indices(), x.col_indices(), x.values()]
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [x.ccol_indices(), x.row_indices(), x.values()]
    if x.layout is torch._mkldnn:
        return [x.to_dense()]
    return [x]


def arguments_by_name(name: str, args: Any, kwargs: Named) -> Named:
    named = dict(zip((a.name for a in schemas()[name].arguments), args, strict=False))
    return named | kwargs


def with_flags_flipped(named: Named) -> Iterator[Named]:
    for key, value in named.items():
        if isinstance(value, bool):
            yield named | {key: not value}
