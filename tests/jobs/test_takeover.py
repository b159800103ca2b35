"""Calls of torch.utils.checkpoint, and modules by name, as regions in code that knows of none."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import weakref

import pytest
import torch
import transformers
from exactness import same_bits
from stand_ins import fake_accelerator
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import ebb
from ebb._launch import checkpoint_calls, takeover

mm, sin = torch.ops.aten.mm.default, torch.ops.aten.sin.default


@pytest.fixture
def taken():
    takeover.install(ebb.policies.recompute_all, "1", ())
    ebb.reset_stats()
    yield
    takeover.remove()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return ((x @ self.w).sin() @ self.w).sin()


def net(length=2):
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(length)])


class Checkpointed(nn.Module):
    """Hugging Face's way: the layer's own forward, in a partial function."""

    def __init__(self, inner, **options):
        super().__init__()
        self.inner = inner
        self.options = options

    def forward(self, x):
        for block in self.inner:
            x = checkpoint(functools.partial(block.forward), x, **self.options)
        return x


def list_form():
    return create_selective_checkpoint_contexts([mm])


def first_product(context, op, *args, **kwargs):
    first_product.calls.append(op)
    if op is mm and first_product.calls.count(mm) % 2:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


first_product.calls = []


def function_form():
    return create_selective_checkpoint_contexts(first_product)


def wrapped():
    model = net()
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    return model


def composed():
    model = net()
    for block in model:
        composable_checkpoint(block)
    return model


def sequential(model):
    return lambda x: checkpoint_sequential(model, 2, x, use_reentrant=False)


WAYS = {
    "reentrant": lambda: Checkpointed(net(), use_reentrant=True),
    "not reentrant": lambda: Checkpointed(net(), use_reentrant=False),
    "no word": lambda: Checkpointed(net()),
    "rng": lambda: Checkpointed(net(), use_reentrant=True, preserve_rng_state=False),
    "options": lambda: Checkpointed(net(), use_reentrant=False, early_stop=False, debug=True),
    "list": lambda: Checkpointed(net(), use_reentrant=False, context_fn=list_form),
    "function": lambda: Checkpointed(net(), use_reentrant=False, context_fn=function_form),
    "wrapper": wrapped,
    "composable": composed,
    "sequential": lambda: sequential(net()),
}


def gradients(model, x):
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    return torch.autograd.grad(model(x).sum(), [x, *[b.w for b in blocks]]), blocks


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant:UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_checkpoint(taken, way):
    x = torch.randn(3, 4, requires_grad=True)
    expected, _ = gradients(net(), x)
    model = WAYS[way]()
    for _ in range(3):
        ebb.reset_stats()
        if way == "sequential":
            found = torch.autograd.grad(model(x).sum(), x)
        else:
            found, blocks = gradients(model, x)
        assert all(map(same_bits, found, expected))
        # torch runs the last segment of a sequence as it is
        assert ebb.stats()["total"]["entered"] == (1 if way == "sequential" else 2)
        assert ebb.stats()["total"]["ops_replayed"] > 0
    if way != "sequential":
        assert [block.calls for block in blocks] == [3, 3]
        assert set(ebb.stats()["regions"]) <= {"Block", "CheckpointWrapper"}


def saved_by(context_fn, x=None):
    x = torch.randn(4, 4, requires_grad=True) if x is None else x
    block = net(1)[0]
    expected = torch.autograd.grad(block(x).sum(), x)[0]
    ebb.reset_stats()
    y = checkpoint(block, x, use_reentrant=False, context_fn=context_fn)
    assert same_bits(torch.autograd.grad(y.sum(), x)[0], expected)
    return ebb.stats()["total"]["bytes_saved"]


def test_lists_and_functions_become_policies(taken):
    assert saved_by(list_form) == 2 * 64
    first_product.calls.clear()

    def context_fn():
        return create_selective_checkpoint_contexts(first_product)

    for _ in range(3):
        assert saved_by(context_fn) == 64
        # asked about each call once; afterwards what it said is known
        assert first_product.calls == [mm, sin, mm, sin]


def test_what_a_function_answers(taken):
    answers = {
        CheckpointPolicy.MUST_SAVE: 128,
        CheckpointPolicy.PREFER_SAVE: 128,
        CheckpointPolicy.MUST_RECOMPUTE: 0,
        CheckpointPolicy.PREFER_RECOMPUTE: 0,
        True: 128,
        False: 0,
    }
    for answer, nbytes in answers.items():

        def context_fn(answer=answer):
            return create_selective_checkpoint_contexts(
                lambda ctx, op, *args, **kwargs: answer if op is mm else False
            )

        assert saved_by(context_fn) == saved_by(context_fn) == nbytes
    with fake_accelerator():

        def offloads():
            return create_selective_checkpoint_contexts(
                lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_CPU_OFFLOAD
            )

        for _ in range(2):
            saved_by(offloads)
            assert ebb.stats()["total"]["bytes_offloaded"] > 0


def test_an_operator_outside_aten_runs_again_as_by_torch(taken):
    calls = []
    with torch.library._scoped_library("ebb_takeover", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: calls.append(x) or x * 2, "CPU")
        twice = torch.ops.ebb_takeover.twice.default
        answers = {
            CheckpointPolicy.PREFER_RECOMPUTE: 1,
            CheckpointPolicy.MUST_RECOMPUTE: 1,
            CheckpointPolicy.MUST_SAVE: 0,
        }
        for answer, replays in answers.items():

            def context_fn(answer=answer):
                return create_selective_checkpoint_contexts(
                    lambda ctx, op, *args, **kwargs: answer if op is twice else False
                )

            def block(x):
                return (twice(x.detach()) * x).sin()

            x = torch.randn(4, requires_grad=True)
            expected = torch.autograd.grad(block(x).sum(), x)[0]
            for _ in range(2):  # it is asked about in the first forward
                calls.clear()
                y = checkpoint(block, x, use_reentrant=False, context_fn=context_fn).sum()
                assert same_bits(torch.autograd.grad(y, x)[0], expected)
                assert len(calls) == 1 + replays


def test_a_function_sees_arguments(taken):
    shapes = []

    def by_shape(context, op, *args, **kwargs):
        assert not context.is_recompute
        if op is mm:
            shapes.append(args[1].shape)
        return CheckpointPolicy.MUST_SAVE if op is mm else CheckpointPolicy.PREFER_RECOMPUTE

    assert saved_by(lambda: create_selective_checkpoint_contexts(by_shape)) == 128
    assert shapes == [(4, 4), (4, 4)]


ASKED = []  # a global: functions that are made for each call may append to it


def function_of_a_call(saved):
    return lambda: create_selective_checkpoint_contexts(
        lambda context, op, *args, **kwargs: ASKED.append(op) or op in saved
    )


def is_in(saved, context, op, *args, **kwargs):
    ASKED.append(op)
    return op in saved


def partial_of_a_call(saved):
    return functools.partial(create_selective_checkpoint_contexts, functools.partial(is_in, saved))


@pytest.mark.parametrize("make", [function_of_a_call, partial_of_a_call])
def test_a_context_fn_made_for_each_call_is_asked_once(taken, make):
    ASKED.clear()

    assert [saved_by(make([mm])) for _ in range(3)] == [128] * 3

    assert [mm, sin, mm, sin] == ASKED


@pytest.mark.parametrize("make", [function_of_a_call, partial_of_a_call])
def test_a_context_fn_with_other_arguments_has_another_policy(taken, make):
    assert [saved_by(make(ops)) for ops in ([mm], [], (mm,), {sin}, [mm])] == [128, 0, 128, 64, 128]


@pytest.mark.parametrize("make", [function_of_a_call, partial_of_a_call])
def test_a_list_that_changes_between_calls_counts_as_another_argument(taken, make):
    saved = [mm]
    context_fn = make(saved)
    assert saved_by(context_fn) == 128

    saved.clear()

    assert saved_by(context_fn) == 0


def test_a_list_of_operators_that_changes_between_calls_gives_another_policy(taken):
    saved = [mm]
    context_fn = functools.partial(create_selective_checkpoint_contexts, saved)
    assert saved_by(context_fn) == 128

    saved.clear()

    assert saved_by(context_fn) == 0


class Unreferable:
    """Allows no weak references, and is equal to everything."""

    __slots__ = ("saved",)
    __hash__ = None

    def __init__(self, saved):
        self.saved = saved

    def __eq__(self, other):
        return True

    def __contains__(self, op):
        return op in self.saved


def test_a_context_fn_that_cannot_be_told_from_others_is_asked_in_each_call(taken):
    saved = [saved_by(partial_of_a_call(Unreferable(ops))) for ops in ([mm], [], [mm])]

    assert saved == [128, 0, 128]
    assert len(checkpoint_calls._policies) == 0


def recursive():
    def context_fn():
        assert context_fn
        return create_selective_checkpoint_contexts([mm])

    return context_fn


def test_a_context_fn_that_refers_to_itself_is_called_each_time(taken):
    assert [saved_by(recursive()) for _ in range(2)] == [128, 128]


class Owner:
    def __init__(self, saved):
        self.saved = saved

    def context_fn(self):
        return create_selective_checkpoint_contexts(
            lambda context, op, *args, **kwargs: op in self.saved
        )


def test_methods_count_by_their_object(taken):
    first, second = Owner([mm]), Owner([])

    assert [saved_by(owner.context_fn) for owner in (first, second, first)] == [128, 0, 128]


def test_answers_do_not_keep_the_arguments_of_a_context_fn(taken):
    owner = Owner([mm])
    saved_by(owner.context_fn)
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None


def test_answers_of_context_fns_that_are_gone_do_not_pile_up(taken):
    for _ in range(checkpoint_calls._FEW):
        saved_by(Owner([mm]).context_fn)
        gc.collect()
    saved_by(list_form)

    assert len(checkpoint_calls._policies) == 1


def test_a_context_fn_that_is_asked_again_and_again_is_told_of(taken, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint_calls, "_MANY", 3)
    monkeypatch.setenv("_EBB_TOLD", "")

    for _ in range(5):
        saved_by(Owner([mm]).context_fn)

    told = capsys.readouterr().err
    assert told.count("ebb: the context_fn of Block gives a new policy in each call") == 1


@pytest.mark.parametrize(
    "answers",
    [[0, 1, 0, 1, 1], [1, 0, 0], [0, 0, 2, 1], [1, 1, 1, 0], [2, 2], [0, 0], [1, 2] * 10],
)
def test_policies_of_answers(answers):
    kinds = [None, ebb.SAVE, ebb.OFFLOAD]
    policy = ebb._policy.from_sac.policy_of_answers({sin: [kinds[a] for a in answers]})
    with fake_accelerator():
        x = torch.randn(16, requires_grad=True)
        ebb.reset_stats()
        with ebb.region(policy):
            y = x
            for _ in answers:
                y = y.sin()
            y = y.cos()
        total = ebb.stats()["total"]
        assert total["bytes_saved"] == 64 * answers.count(1)
        torch.autograd.grad(y.sum(), x)


def test_too_many_different_answers_are_asked_for_each_time():
    assert ebb._policy.from_sac.policy_of_answers({sin: [ebb.SAVE, None] * 100}) is None


def test_other_contexts_are_entered_in_forward(taken):
    entered = []

    class Context:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            entered.append(self.name)

        def __exit__(self, *_):
            entered.append(f"{self.name} left")

    checkpoint_calls._warn_recompute_context.cache_clear()
    with pytest.warns(
        UserWarning, match="recomputation context that a context_fn returned is ignored"
    ):
        saved_by(lambda: (Context("forward"), Context("recompute")))
    assert entered == ["forward", "forward left"]


def test_an_exception_inside_leaves_the_region(taken):
    def fails(x):
        raise ZeroDivisionError

    model = net()
    composable_checkpoint(model[1])
    model[1].forward = fails
    x = torch.randn(4, 4, requires_grad=True)
    for reentrant in (True, False):
        with pytest.raises(ZeroDivisionError):
            checkpoint(fails, x, use_reentrant=reentrant)
        assert not ebb._C.in_region()
    with pytest.raises(ZeroDivisionError):
        model(x)
    assert not ebb._C.in_region()


def test_torchs_functions_look_as_before():
    before = inspect.signature(checkpoint), inspect.getsource(inspect.unwrap(checkpoint))[:20]
    takeover.install(ebb.policies.recompute_all, "1", ())
    assert inspect.signature(checkpoint) == before[0]
    takeover.remove()
    assert (
        inspect.signature(checkpoint),
        inspect.getsource(inspect.unwrap(checkpoint))[:20],
    ) == before
    x = torch.randn(4, 4, requires_grad=True)
    block = net(1)[0]
    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert block.calls == 2


def test_under_compile_torch_decides(taken):
    block = net(1)[0]
    x = torch.randn(4, 4, requires_grad=True)
    expected = torch.autograd.grad(block(x).sum(), x)[0]

    @functools.partial(torch.compile, backend="aot_eager")
    def program(x):
        return checkpoint(block, x, use_reentrant=False)

    assert torch.allclose(torch.autograd.grad(program(x).sum(), x)[0], expected)


# Modules


@pytest.fixture
def by_name():
    def install(*patterns, policy=ebb.policies.recompute_all):
        takeover.install(policy, "1", patterns)
        ebb.reset_stats()

    yield install
    takeover.remove()


def step(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()


def test_modules_become_regions_at_the_first_forward(by_name, capsys):
    by_name("*0", "other.*")
    model = nn.Sequential(net(), net())
    x = torch.randn(4, 4, requires_grad=True)
    expected = torch.autograd.grad(net()(net()(x)).sum(), x)[0]
    ebb.reset_stats()
    found = torch.autograd.grad(model(x).sum(), x)[0]
    assert same_bits(found, expected)
    assert set(ebb.stats()["regions"]) == {"0", "1.0"}
    assert "and so are modules that match *0,other.*" in capsys.readouterr().err


def test_names_that_match_nothing(by_name):
    by_name("*.layres.*")
    model = net()
    step(model, torch.randn(4, 4))
    with pytest.warns(
        UserWarning, match=r"no module matches .*\*\.layres\.\*, .* Module names of Sequential: 0-1"
    ):
        step(model, torch.randn(4, 4))


def test_rules_for_modules(by_name):
    x = torch.randn(4, 4, requires_grad=True)
    for pattern, nbytes in [("1", 0), ("inner.1", 128), ("inner", 0), ("*", 256)]:
        by_name(policy=ebb.Policy([ebb.Rule("aten::mm", ebb.SAVE, module=pattern)]))
        gradients(Checkpointed(net(), use_reentrant=False), x)
        assert ebb.stats()["total"]["bytes_saved"] == nbytes


def tiny_llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).train()


def train(model, steps=3):
    torch.manual_seed(1)
    ids = torch.randint(0, 61, (2, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers(taken, reentrant):
    expected = train(tiny_llama())
    model = tiny_llama()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert train(model) == expected
    assert ebb.stats()["regions"]["LlamaDecoderLayer"]["entered"] == 3
    assert ebb.stats()["total"]["ops_replayed"] > 0
    assert ebb.stats()["total"]["bytes_saved"] == 0


def test_layers_of_transformers_by_name(by_name):
    expected = train(tiny_llama())
    by_name("*.layers.?")
    assert train(tiny_llama()) == expected
    regions = ebb.stats()["regions"]
    assert set(regions) == {f"model.layers.{i}" for i in range(3)}
    assert all(region["ops_replayed"] > 0 for region in regions.values())


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: (m[0](x), m(x)),
        lambda m, x: (m(x), nn.Sequential(m)(x)),
        lambda m, x: (m(x), copy.deepcopy(m)(x)),
        lambda m, x: (ebb.apply(m, modules="0.0"), m(x)),
        lambda m, x: (ebb.apply(m, modules=""), m(x)),
    ],
)
def test_models_whose_parts_are_regions_already(by_name, use):
    by_name("*0")
    use(nn.Sequential(net(), net()), torch.randn(4, 4))


def test_lazy_models_run(by_name):
    by_name("*0")
    model = nn.Sequential(nn.Sequential(nn.LazyLinear(4)))
    model(torch.randn(3, 4))
    model(torch.randn(3, 4))


def test_the_context_fn_of_a_policy_keeps_all_its_rules(taken):
    policy = ebb.Policy([ebb.Rule("aten::mm", ebb.SAVE, max_bytes=64)])
    assert saved_by(policy.to_sac()) == 128
    policy = ebb.Policy([ebb.Rule("aten::mm", ebb.SAVE, max_bytes=63)])
    assert saved_by(policy.to_sac()) == 0


def test_the_context_fn_of_a_policy_that_was_freed_keeps_all_its_rules(taken):
    assert saved_by(ebb.Policy([ebb.Rule("aten::mm", ebb.SAVE, max_bytes=64)]).to_sac()) == 128
