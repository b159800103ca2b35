"""Real models train in regions as in plain eager: every loss, gradient, parameter and buffer."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random

import pytest
import torch
from torch import nn

import ebb
from ebb_tests.exactness import replayed, same_bits
from ebb_tests.programs.real_models import FAMILIES, VOCABULARY, Critic, adamw, generator, sgd

STEPS = 3
DTYPES = {"float32": torch.float32, "autocast": torch.bfloat16}
NAMED = ("recompute_all", "save_matmuls", "torchtitan")


def random_policy(seed: int) -> ebb.Policy:
    """A decision for each operator of torch, and for some of them only at every n-th call."""
    names = {n.split(".")[0] for n in torch._C._dispatch_get_all_op_names()}
    rules = []
    for name in sorted(n for n in names if n.startswith("aten::")):
        draw = random.Random(f"{seed} {name}")
        decision = draw.choice([ebb.SAVE, ebb.RECOMPUTE])
        rules.append(ebb.Rule(name, decision, every=draw.choice([1, 1, 2, 3])))
    return ebb.Policy(rules, default=random.Random(seed).choice([ebb.SAVE, ebb.RECOMPUTE]))


@functools.cache
def policy_of(name: str) -> ebb.Policy:
    kind, _, seed = name.partition(" ")
    return random_policy(int(seed)) if kind == "random" else getattr(ebb.policies, kind)


class Training:
    """One model in training; `state` holds everything that must be as in eager.

    `way` is "region", one region around each forward, or "apply", a region for each block.
    """

    def __init__(self, name, dtype, policy=None, way="region", optimizer=None, prepare=None):
        torch.manual_seed(0)
        self.family = FAMILIES[name]
        self.dtype = DTYPES[dtype]
        self.model = self.family.build().train()
        if prepare is not None:
            prepare(self.model)
        self.region = None
        if policy is not None and way == "region":
            self.region = policy_of(policy)
        elif policy is not None:
            ebb.apply(self.model, policy_of(policy), self.family.blocks)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = (optimizer or self.family.optimizer)(trainable)
        self.state = {}
        self.replayed = 0

    @contextlib.contextmanager
    def around(self):
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            if self.region is None:
                yield
            else:
                with ebb.region(self.region, type(self.model).__name__):
                    yield

    def loss(self):
        """The forward and its loss, without a region around it."""
        output = self.model(**self.family.batch())
        return output if isinstance(output, torch.Tensor) else output.loss

    def forward(self):
        with self.around():
            return self.loss()

    def run(self, step):
        torch.manual_seed(1)
        for i in range(STEPS):
            for j, result in enumerate(step(self)):
                self.state[f"result {j} of step {i}"] = result.detach().clone()
            self.replayed += replayed()
            for name, p in self.model.named_parameters():
                self.state[f"grad of {name}, step {i}"] = None if p.grad is None else p.grad.clone()
            self.optimizer.step()
            self.optimizer.zero_grad()
        for name, t in (*self.model.named_parameters(), *self.model.named_buffers()):
            self.state[name] = t.detach().clone()
        self.state["random state"] = torch.get_rng_state()
        return self


def one_step(training):
    loss = training.forward()
    loss.backward()
    return [loss]


def assert_equal(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not same_bits(actual[name], expected[name])] == []


@pytest.fixture(scope="module")
def eager():
    """The states that plain eager reaches, each computed once; it reproduces them itself."""

    @functools.cache
    def states(name, dtype, step=one_step, optimizer=None, prepare=None):
        first, second = (
            Training(name, dtype, optimizer=optimizer, prepare=prepare).run(step).state
            for _ in range(2)
        )
        assert_equal(second, first)
        assert any(t is not None and t.any() for key, t in first.items() if key.startswith("grad"))
        return first

    return states


def check(eager, name, dtype, policy, way, step=one_step, optimizer=None, prepare=None):
    expected = eager(name, dtype, step, optimizer, prepare)
    training = Training(name, dtype, policy, way, optimizer, prepare).run(step)
    assert_equal(training.state, expected)
    # Around a block as a whole, a region has nothing to do if torch checkpoints inside of it.
    may_do_nothing = way == "apply" and prepare in CHECKPOINTED
    assert policy not in NAMED or may_do_nothing or training.replayed > 0


WAYS = pytest.mark.parametrize("way", ["region", pytest.param("apply", marks=pytest.mark.sweep)])
POLICY = pytest.mark.parametrize("policy", ["recompute_all", "save_matmuls", "random 0"])


def every_family(test):
    for name, values in (("dtype", DTYPES), ("name", FAMILIES)):
        test = pytest.mark.parametrize(name, values)(test)
    return WAYS(test)


@every_family
@pytest.mark.parametrize("policy", [*NAMED, "random 0"])
def test_training_is_as_in_eager(eager, name, dtype, policy, way):
    check(eager, name, dtype, policy, way)


@pytest.mark.slow
@every_family
def test_training_is_as_in_eager_under_many_random_policies(eager, name, dtype, way):
    for seed in range(1, 21):
        check(eager, name, dtype, f"random {seed}", way)


def two_micro_batches(training):
    first, second = training.forward(), training.forward()
    first.backward()
    second.backward()
    return [first, second]


def outputs_kept(training):
    with training.around():
        batch = training.family.batch()
        output = training.model(**batch, use_cache=True, output_hidden_states=True)
        penalty = sum(h.square().mean() for h in output.hidden_states)
    (output.loss + penalty).backward()
    return [output.loss, output.logits, *output.hidden_states]


def generate(training):
    training.model.eval()
    prompt = torch.randint(3, VOCABULARY, (2, 4))
    made = training.model.generate(prompt, max_new_tokens=5, do_sample=True, use_cache=True)
    training.model.train()
    return made


def generate_before(training):
    with training.around():
        made = generate(training)
    return [made, *one_step(training)]


def generate_within(training):
    with training.around():
        before = generate(training)
        loss = training.loss()
        after = generate(training)
    loss.backward()
    return [before, loss, after]


def generate_outside(training):
    loss = training.forward()
    made = generate(training)
    loss.backward()
    return [loss, made]


@torch.no_grad()
def score(training):
    return training.loss()


@torch.inference_mode()
def score_in_inference_mode(training):
    return training.loss()


def evaluate(training, scored):
    training.model.eval()
    result = scored(training)
    training.model.train()
    return result


def evaluate_within(training):
    with training.around():
        before = evaluate(training, score)
        loss = training.loss()
        after = evaluate(training, score_in_inference_mode)
    loss.backward()
    return [before, loss, after]


def evaluate_between(training):
    with training.around():
        before = evaluate(training, score_in_inference_mode)
    loss = training.forward()
    with training.around():
        after = evaluate(training, score)
    loss.backward()
    return [before, loss, after]


class Adapter(nn.Module):
    """A frozen linear layer and a trained correction of low rank."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(self.dropout(x))) * 2


def adapt(model):
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        layer.mlp.down_proj = Adapter(layer.mlp.down_proj)


def adapt_with_input_grads(model):
    adapt(model)
    model.enable_input_require_grads()


def checkpoint_blocks(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})


def checkpoint_blocks_reentrantly(model):
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


CHECKPOINTED = (checkpoint_blocks, checkpoint_blocks_reentrantly)
CASES = [
    case
    for names, dtypes, steps, prepares in (
        (
            ("Llama", "Mixtral", "T5", "Mamba", "ResNet", "U-Net", "weight and spectral norm"),
            DTYPES,
            (two_micro_batches,),
            (None,),
        ),
        (("Llama", "Gemma2", "GPT-2", "Mamba"), ("float32",), (outputs_kept,), (None,)),
        (
            ("Llama", "Mamba"),
            ("float32",),
            (generate_before, generate_within, generate_outside),
            (None,),
        ),
        (
            ("Llama", "DeepSeek-V3", "BERT", "ResNet", "Conv and BatchNorm", "nn.Transformer"),
            ("float32",),
            (evaluate_within, evaluate_between),
            (None,),
        ),
        (("Llama",), DTYPES, (one_step,), (adapt, adapt_with_input_grads)),
        (("Llama", "Mixtral", "GPT-2", "BERT", "T5", "ViT"), DTYPES, (one_step,), CHECKPOINTED),
    )
    for case in itertools.product(names, dtypes, steps, prepares)
]


@WAYS
@POLICY
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore::FutureWarning")
@pytest.mark.parametrize(("name", "dtype", "step", "prepare"), CASES)
def test_other_kinds_of_steps_and_models_are_as_in_eager(
    eager, name, dtype, step, prepare, policy, way
):
    check(eager, name, dtype, policy, way, step, prepare=prepare)


def clipped(training):
    loss = training.forward()
    loss.backward()
    return [loss, nn.utils.clip_grad_norm_(training.model.parameters(), 0.3)]


OPTIMIZERS = {
    "AdamW, foreach": functools.partial(adamw, foreach=True, amsgrad=True),
    "AdamW, fused": functools.partial(adamw, fused=True),
    "SGD, foreach": functools.partial(sgd, foreach=True),
    "SGD, fused": functools.partial(sgd, fused=True),
    "RMSprop": functools.partial(torch.optim.RMSprop, momentum=0.9, weight_decay=0.1),
}


@WAYS
@pytest.mark.parametrize("policy", ["recompute_all", "random 0"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Conv and BatchNorm"])
def test_optimizers_with_weight_decay_and_clipped_gradients(eager, name, optimizer, policy, way):
    check(eager, name, "float32", policy, way, clipped, OPTIMIZERS[optimizer])


@pytest.mark.parametrize("policy", ["recompute_all", "random 0"])
@pytest.mark.parametrize("optimizer", ["AdamW, fused", "SGD, foreach"])
@pytest.mark.parametrize("name", ["Llama", "T5", "Conv and BatchNorm", "weight and spectral norm"])
def test_whole_loop_with_its_optimizer_in_one_region(eager, name, optimizer, policy):
    expected = eager(name, "float32", clipped, OPTIMIZERS[optimizer])
    training = Training(name, "float32", optimizer=OPTIMIZERS[optimizer])

    with ebb.region(policy_of(policy)):
        training.run(clipped)

    assert_equal(training.state, expected)
    assert policy not in NAMED or training.replayed > 0


def penalised(critic, real, fake):
    share = torch.rand(len(real), 1, 1, 1)
    mixed = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    return critic(fake).mean() - critic(real).mean() + 10 * penalty


def wasserstein(region, wrap=lambda module: None):
    torch.manual_seed(0)
    critic, maker = Critic(), generator()
    wrap(critic)
    wrap(maker)
    pairs = [(m, torch.optim.RMSprop(m.parameters(), lr=1e-3)) for m in (critic, maker)]
    states = []
    for _ in range(STEPS):
        for train_critic in (True, True, False):
            with region():
                fake = maker(torch.randn(4, 8))
                if train_critic:
                    loss = penalised(critic, torch.randn(4, 3, 16, 16), fake.detach())
                else:
                    loss = -critic(fake).mean()
            loss.backward()
            module, optimizer = pairs[not train_critic]
            states += [loss.detach().clone(), *(p.grad.clone() for p in module.parameters())]
            optimizer.step()
            for m, _ in pairs:
                m.zero_grad()
    for module, _ in pairs:
        states += [t.detach().clone() for t in (*module.parameters(), *module.buffers())]
    return [*states, torch.get_rng_state()]


@WAYS
@pytest.mark.parametrize("policy", [*NAMED, "random 0", "random 1"])
def test_gradient_penalty_of_an_adversarial_pair(policy, way):
    expected = wasserstein(contextlib.nullcontext)

    if way == "region":
        actual = wasserstein(lambda: ebb.region(policy_of(policy)))
    else:
        actual = wasserstein(contextlib.nullcontext, lambda m: ebb.apply(m, policy_of(policy), ""))

    assert all(same_bits(a, e) for a, e in zip(actual, expected, strict=True))
    assert policy not in NAMED or replayed() > 0


def test_tied_embeddings_stay_tied():
    training = Training("GPT-2", "float32", "recompute_all", "apply").run(one_step)

    assert training.model.lm_head.weight is training.model.transformer.wte.weight
    assert "grad of lm_head.weight, step 0" not in training.state
