"""What a kernel sees besides its arguments: a replay sees what the forward saw, and all is left as
it is."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import ebb
from ebb_tests.memory_use import least_growth
from ebb_tests.other_threads import in_thread
from ebb_tests.programs.paged import Keep

seen = []  # by `look`, each time that its kernel runs
LOOKS = [lambda: None]


@torch.library.custom_op("ebb_test::look", mutates_args=())
def look(x: torch.Tensor) -> torch.Tensor:
    seen.append(LOOKS[-1]())
    return x * 2


look.register_autograd(lambda ctx, gradient: gradient * 2)


@pytest.fixture
def x():
    return torch.randn(4, requires_grad=True)


@pytest.fixture(autouse=True)
def _nothing_seen():
    seen.clear()
    yield
    del LOOKS[1:]


RECOMPUTED = ebb.Policy({"ebb_test::look": ebb.RECOMPUTE})


def flushes_denormals():
    return torch.tensor([1e-40]).mul(0.5).item() == 0


C = torch._C
SETTINGS = {  # how to get and to set it, and two values
    "default dtype": (
        torch.get_default_dtype,
        torch.set_default_dtype,
        (torch.float32, torch.float64),
    ),
    "threads": (torch.get_num_threads, torch.set_num_threads, (1, 2)),
    "oneDNN": (C._get_mkldnn_enabled, C._set_mkldnn_enabled, (True, False)),
    "oneDNN, deterministic": (
        C._get_mkldnn_deterministic,
        C._set_mkldnn_deterministic,
        (False, True),
    ),
    "NNPACK": (C._get_nnpack_enabled, C._set_nnpack_enabled, (True, False)),
    "cuDNN": (C._get_cudnn_enabled, C._set_cudnn_enabled, (True, False)),
    "cuDNN, by timing": (C._get_cudnn_benchmark, C._set_cudnn_benchmark, (False, True)),
    "cuDNN, deterministic": (C._get_cudnn_deterministic, C._set_cudnn_deterministic, (False, True)),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        (False, True),
    ),
    "deterministic, or a warning": (
        torch.is_deterministic_algorithms_warn_only_enabled,
        lambda only: torch.use_deterministic_algorithms(True, warn_only=only),
        (False, True),
    ),
    "flushed denormals": (flushes_denormals, torch.set_flush_denormal, (False, True)),
}


@pytest.fixture(params=SETTINGS)
def setting(request):
    """Gets, sets, and its values; it is put back afterwards."""
    get, put, values = SETTINGS[request.param]
    before, deterministic = get(), torch.are_deterministic_algorithms_enabled()
    put(values[1])
    if get() != values[1]:
        pytest.skip("there is no such setting here")
    put(before)
    LOOKS.append(get)
    yield get, put, values
    put(before)
    torch.use_deterministic_algorithms(deterministic)


def region():
    return ebb.region(RECOMPUTED, name="block")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first", "second"])
def test_a_replay_sees_the_setting_of_its_forward_and_puts_back_the_others(setting, order, x):
    get, put, values = setting
    inside, outside = (values[i] for i in order)
    put(inside)
    with region():
        loss = look(x * 1).square().sum()
    put(outside)
    gradient = torch.autograd.grad(loss, x)[0]

    assert seen == [inside, inside]
    assert get() == outside
    assert torch.equal(gradient, 8 * x)


def test_each_replay_sees_the_setting_of_its_own_forward(setting, x):
    """It changes within a region, to and fro."""
    get, put, values = setting
    inside = [values[i] for i in (0, 1, 0, 1, 1, 0)]
    loss = 0
    with region():
        for value in inside:
            put(value)
            loss = loss + look(x * 1).square().sum()
    torch.autograd.grad(loss, x)

    assert seen[: len(inside)] == inside
    assert sorted(map(str, seen[len(inside) :])) == sorted(map(str, inside))
    assert get() == inside[-1]


def test_an_error_of_a_replay_leaves_the_setting_as_it_is(setting, x):
    get, put, values = setting
    put(values[0])
    with region():
        loss = look(x * 1).square().sum()
    put(values[1])
    LOOKS.append(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(loss, x)

    assert get() == values[1]


def test_a_setting_that_is_the_same_is_left_to_others(x):
    """Another thread may change it while a replay runs; here the kernel does."""
    before = C._get_cudnn_benchmark()
    with region():
        loss = look(x * 1).square().sum()
    LOOKS.append(lambda: C._set_cudnn_benchmark(not before))
    try:
        torch.autograd.grad(loss, x)
        assert C._get_cudnn_benchmark() != before
    finally:
        C._set_cudnn_benchmark(before)


def test_what_the_thread_includes_and_excludes_is_not_seen_and_stays(x):
    """Asked for by hand: autograd puts it back itself."""
    key = C.DispatchKey.FuncTorchVmapMode
    LOOKS.append(lambda: C._dispatch_tls_is_dispatch_key_included(key))
    with region():
        y = Keep.apply(look(x * 1))
        ctx = Keep.last
    with C._IncludeDispatchKeyGuard(key):
        before = str(C._dispatch_tls_local_include_set()), str(C._dispatch_tls_local_exclude_set())
        (saved,) = ctx.saved_tensors
        after = str(C._dispatch_tls_local_include_set()), str(C._dispatch_tls_local_exclude_set())
    Keep.last = None

    assert y.requires_grad
    assert torch.equal(saved, 2 * x)
    assert seen == [False, False]
    assert before == after


def test_the_dtype_of_autocast_stays(x):
    with cast(HALF), region():
        y = Keep.apply(look(x * 1))
        ctx = Keep.last
    with cast(BRAIN):
        (saved,) = ctx.saved_tensors
        assert autocast() == BRAIN
    Keep.last = None
    assert y.requires_grad
    assert torch.equal(saved, 2 * x)


def test_states_that_come_again_take_no_memory():
    x = torch.ones(1)
    before = C._get_cudnn_benchmark()

    def alternate():
        for number in range(20_000):
            C._set_cudnn_benchmark(number % 2 == 0)
            torch.sin(x)

    with region():
        alternate()
        grown = least_growth(alternate)
    C._set_cudnn_benchmark(before)
    assert grown < 500


# Autocast: kernels of operators that it does not know see it.


def autocast():
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


OUT, HALF, BRAIN = (False, torch.bfloat16), (True, torch.float16), (True, torch.bfloat16)


def cast(state):
    enabled, dtype = state
    return torch.autocast("cpu", dtype, enabled=enabled)


@pytest.mark.parametrize("inside", [OUT, HALF, BRAIN], ids=str)
@pytest.mark.parametrize("outside", [OUT, HALF, BRAIN], ids=str)
def test_products_within_a_kernel_are_cast_as_in_the_forward(inside, outside, x):
    w = torch.randn(4, 4)
    LOOKS.append(lambda: (w @ w).dtype)
    with cast(inside), region():
        loss = look(x * 1).square().sum()
    with cast(outside):
        before = autocast()
        torch.autograd.grad(loss, x)
        after = autocast()

    assert seen == [inside[1] if inside[0] else torch.float32] * 2
    assert before == after
    assert autocast() == OUT


def test_products_are_cast_to_the_dtype_of_each_forward(x):
    w = torch.randn(4, 4)
    LOOKS.append(lambda: (w @ w).dtype)
    loss = 0
    states = [BRAIN, HALF, OUT, BRAIN, OUT, HALF]
    with region():
        for state in states:
            with cast(state):
                loss = loss + look(x * 1).square().sum()
    torch.autograd.grad(loss, x)

    expected = [dtype if enabled else torch.float32 for enabled, dtype in states]
    assert seen[: len(states)] == expected
    assert sorted(map(str, seen[len(states) :])) == sorted(map(str, expected))


# Precision: a replay under another one is refused.


def precision(backend, op):
    return (
        lambda: C._get_fp32_precision_getter(backend, op),
        lambda value: C._set_fp32_precision_setter(backend, op, value),
    )


def product(x):
    return x @ x


def convolution(x):
    return torch.nn.functional.conv2d(x[None, None], x[None, None, :2, :2])


HALF_SUMS = (
    C._get_cpu_allow_fp16_reduced_precision_reduction,
    C._set_cpu_allow_fp16_reduced_precision_reduction,
)
READ = [  # a program, a setting, two values of it, and whether a kernel in it reads that
    ("product", product, precision("mkldnn", "matmul"), ("ieee", "bf16"), True),
    ("product", product, precision("mkldnn", "conv"), ("ieee", "bf16"), False),
    ("product", product, precision("cuda", "matmul"), ("ieee", "tf32"), False),
    ("product", product, HALF_SUMS, (False, True), True),
    ("convolution", convolution, precision("mkldnn", "conv"), ("ieee", "bf16"), True),
    ("convolution", convolution, precision("cuda", "conv"), ("ieee", "tf32"), False),
    ("sine", torch.sin, precision("mkldnn", "matmul"), ("ieee", "bf16"), False),
]


@pytest.mark.parametrize(
    ("program", "setting", "values", "read"),
    [row[1:] for row in READ],
    ids=[f"{row[0]}-{number}" for number, row in enumerate(READ)],
)
def test_only_the_precision_that_a_kernel_reads_is_asked_for(program, setting, values, read):
    get, put = setting
    before = get()
    try:
        put(values[1])
    except RuntimeError as error:
        pytest.skip(str(error))
    x = torch.randn(8, 8, requires_grad=True)
    try:
        put(values[0])
        with ebb.region(name="block"):
            loss = program(x * 1).exp().sin().sum()
        put(values[1])
        if read:
            with pytest.raises(RuntimeError, match=r"in region 'block'.*precision"):
                loss.backward()
        else:
            loss.backward()
    finally:
        put(before)


def of_a_new_thread():
    return in_thread(torch.get_num_threads)


@pytest.fixture
def backward_thread():
    """A thread with 4 intra-op threads, in a program that has 1 from now on."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 4
        torch.set_num_threads(1)
        yield pool
    torch.set_num_threads(before)


def test_threads_that_start_after_a_replay_have_the_number_of_the_program(x, backward_thread):
    with region():
        loss = look(x * 1).square().sum()
    backward_thread.submit(loss.backward).result()

    assert backward_thread.submit(torch.get_num_threads).result() == 4
    assert (torch.get_num_threads(), of_a_new_thread()) == (1, 1)


def test_threads_that_start_during_a_replay_have_the_number_of_the_program(x, backward_thread):
    LOOKS.append(of_a_new_thread)
    with region():
        loss = look(x * 1).square().sum()
    torch.set_num_threads(2)
    backward_thread.submit(loss.backward).result()

    assert seen == [1, 2]


def test_a_replay_has_the_threads_of_its_forward_in_openmp_and_mkl(x, backward_thread):
    def maxima():
        found = re.findall(
            r"(omp|mkl)_get_max_threads\(\) : (\d+)", torch.__config__.parallel_info()
        )
        return dict(found)

    LOOKS.append(maxima)
    with region():
        loss = look(x * 1).square().sum()
    before = backward_thread.submit(maxima).result()
    backward_thread.submit(loss.backward).result()

    assert set(before.values()) == {"4"}
    assert [set(counts.values()) for counts in seen] == [{"1"}, {"1"}]
    assert backward_thread.submit(maxima).result() == before


def test_a_replay_on_another_thread_adds_in_the_order_of_its_forward(backward_thread):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1 << 18, generator=generator).requires_grad_()
    assert x.sum() != backward_thread.submit(x.sum).result(), "the last bits depend on the number"

    def loss():
        return (x.sum() * x[:8]).sin().exp().sum()

    with ebb.region(ebb.policies.recompute_all):
        ours = loss()
    backward_thread.submit(ours.backward).result()
    gradient, x.grad = x.grad, None
    backward_thread.submit(loss().backward).result()

    assert torch.equal(gradient, x.grad)
