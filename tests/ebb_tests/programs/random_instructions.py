"""Instructions of random programs that make tensors. Arguments: the machine and three operands."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ebb_tests.programs.random_programs import Skip

# Conditions that a tensor must meet to be an operand.


def is_float(t: torch.Tensor) -> bool:
    return t.is_floating_point() and t.numel() > 0


def is_vector(t: torch.Tensor) -> bool:
    return is_float(t) and t.dim() > 0


def is_differentiable(t: torch.Tensor) -> bool:
    return t.requires_grad and t.numel() > 0


def fits(t: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    """Floats that broadcast to `t`."""

    def suits(o: torch.Tensor) -> bool:
        pairs = zip(reversed(o.shape), reversed(t.shape), strict=False)
        return is_float(o) and o.dim() <= t.dim() and all(m in (1, n) for m, n in pairs)

    return suits


def alike(t: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    return lambda o: o.shape == t.shape and o.dtype == t.dtype


def choose(table: tuple, operand: int) -> Callable:
    return table[operand % len(table)]


# Operators whose results have their own storage.

UNARY = (
    torch.sin, torch.tanh, torch.sigmoid, torch.relu, F.gelu, F.silu, torch.cos, torch.abs,
    torch.square, F.softplus, F.leaky_relu, torch.erf, F.elu, torch.atan, F.logsigmoid, F.mish,
    torch.neg, torch.clone, F.hardtanh, F.hardswish, F.selu, F.softsign, torch.asinh, torch.sign,
    lambda t: t.clamp(max=2).exp(), lambda t: t.abs().add(0.1).sqrt(), lambda t: t.abs().log1p(),
    lambda t: 1 / (t.abs() + 1), lambda t: t.clamp(-1, 1), lambda t: t * 0.5 + 1,
    lambda t: t.pow(2), lambda t: t.roll(1), lambda t: t.contiguous(), torch.zeros_like,
    lambda t: torch.fake_quantize_per_tensor_affine(t, 0.1, 0, -8, 7), lambda t: t.sin() * t,
    lambda t: t.to_sparse().to_dense(), lambda t: t.tanh().mul_(t), lambda t: (t + 1).relu_(),
)  # fmt: skip
ALONG = (
    lambda t, d: t.sum(d), lambda t, d: t.mean(d, True), lambda t, d: t.softmax(d),
    lambda t, d: t.log_softmax(d), lambda t, d: t.cumsum(d), lambda t, d: t.logsumexp(d),
    lambda t, d: t.amax(d), lambda t, d: t.norm(dim=d), lambda t, d: t.flip(d),
    lambda t, d: t.prod(d, True), lambda t, d: F.normalize(t, dim=d), lambda t, d: t.cumprod(d),
    lambda t, d: F.layer_norm(t, t.shape[-1:]), lambda t, d: F.rms_norm(t, t.shape[-1:]),
    lambda t, d: t.var(d, correction=0), lambda t, d: F.glu(t, d), lambda t, d: t.renorm(2, d, 1.0),
    lambda t, d: t.repeat_interleave(2, d), lambda t, d: t.sum(), lambda t, d: t.mean(),
    lambda t, d: torch.fft.rfft(t, dim=d).abs(), lambda t, d: torch.fft.rfft(t, dim=d),
    lambda t, d: torch.vmap(torch.tanh)(t), lambda t, d: t.logcumsumexp(d),
    lambda t, d: torch.func.grad(lambda u: u.sin().sum())(t), lambda t, d: t.diff(dim=d),
    lambda t, d: torch.linalg.svdvals(t), lambda t, d: torch.linalg.det(t[:3, :3]),
)  # fmt: skip
BINARY = (
    torch.mul, torch.add, torch.sub, torch.maximum, torch.minimum, torch.hypot, torch.atan2,
    lambda a, b: a / (b.abs() + 1), lambda a, b: a.addcmul(b, a), lambda a, b: a.lerp(b, 0.3),
    lambda a, b: torch.where(b > 0, a, b), lambda a, b: a.addcdiv(a, b.abs() + 1),
    lambda a, b: a.masked_fill(b > 0, 0.5), F.mse_loss, F.smooth_l1_loss, torch.logaddexp,
    lambda a, b: torch.addcmul(a, a, b), lambda a, b: torch.sigmoid(a) * b,
)  # fmt: skip
# Avoids calls for which eager reads memory outside of its tensors: median of an expanded tensor,
# group_norm with a strided weight, group_norm before sgn.
SEVERAL = (
    lambda t, d: t.sort(d), lambda t, d: t.topk(2, d), lambda t, d: t.max(d),
    lambda t, d: t.min(d, True), lambda t, d: t.contiguous().median(d), lambda t, d: t.cummax(d),
    lambda t, d: t.aminmax(dim=d), lambda t, d: t.kthvalue(1, d), lambda t, d: torch.var_mean(t, d),
    lambda t, d: torch.native_layer_norm(t, t.shape[-1:], None, None, 1e-5),
    lambda t, d: torch.frexp(t), lambda t, d: t.mode(d),
    lambda t, d: torch.linalg.eigh(t @ t.mT), lambda t, d: torch.linalg.lu(t),
    lambda t, d: torch.linalg.qr(t), lambda t, d: torch.std_mean(t, d), lambda t, d: t.cummin(d),
)  # fmt: skip
FOREACH = (
    torch._foreach_add, torch._foreach_mul, torch._foreach_maximum, torch._foreach_sub,
    lambda s, o: torch._foreach_exp(torch._foreach_neg(torch._foreach_abs(s))),
    lambda s, o: torch._foreach_lerp(s, o, 0.25), lambda s, o: torch._foreach_addcmul(s, o, o),
    lambda s, o: torch._foreach_norm(s), lambda s, o: torch._foreach_tanh(s),
)  # fmt: skip


def unary(m, a, b, c):
    m.map(a, is_float, choose(UNARY, b))


def along(m, a, b, c):
    m.map(a, is_vector, lambda t: choose(ALONG, b)(t, c % t.dim()))


def binary(m, a, b, c):
    left = m.pick(a, is_float)
    m.push(choose(BINARY, c)(left, m.pick(b, fits(left))))


def several(m, a, b, c):
    m.map(a, is_vector, lambda t: choose(SEVERAL, b)(t, c % t.dim()))


def product(m, a, b, c):
    left = m.pick(a, lambda t: is_float(t) and t.dim() >= 2)
    inner, same = left.shape[-1], left.dtype
    right = m.pick(b, lambda t: is_float(t) and t.dim() <= 2 and t.shape[-1:] == (inner,)).to(same)
    square = right.shape == (inner, inner) and left.dim() == 2
    kind = c % 8
    if right.dim() == 2 and kind == 1 and left.dim() == 2:
        m.push(torch.addmm(right.sum(1), left, right.t()))
    elif right.dim() == 2 and kind == 2:
        m.push(F.linear(left, right, m.pick(a, lambda t: t.shape == right.shape[:1]).to(same)))
    elif kind == 3:
        m.push(torch.bmm(left.reshape(-1, 1, inner), left.reshape(-1, inner, 1)))
    elif kind == 4 and left.dim() == 3:
        drop = 0.3 * (b % 2)
        m.push(F.scaled_dot_product_attention(left, left * 0.5, left.sin(), dropout_p=drop))
    elif kind == 5 and square:
        m.push(torch.gru_cell(left, left * 0.5, right.repeat(3, 1), right.repeat(3, 1)))
    elif kind == 6 and square:
        m.push(torch.lstm_cell(left, (left, left.sin()), right.repeat(4, 1), right.repeat(4, 1)))
    else:
        m.push(left @ (right.t() if right.dim() == 2 else right))


def listed(m, a, b, c):
    first = m.pick(a, is_float)
    both = [first, m.pick(b, alike(first)), m.pick(c, alike(first))]
    if c % 3 == 0 and first.dim() > 0:
        m.push(torch.cat(both, b % first.dim()))
    elif c % 3 == 1:
        m.push(torch.stack(both, b % (first.dim() + 1)))
    else:
        m.push(choose(FOREACH, b)(both[:2], both[1:]))


def indexed(m, a, b, c):
    t = m.pick(a, is_vector)
    rows = t.shape[0]
    index = m.pick(b, lambda i: i.dtype == torch.int64 and i.dim() == 1) % rows
    tables = (
        lambda: t[index],
        lambda: t.index_select(0, index),
        lambda: F.embedding(index, t),
        lambda: F.embedding_bag(index[None], t, mode="mean"),
        lambda: F.embedding_bag(index[None], t, mode="mean"),
        lambda: t.gather(0, index.reshape(-1, *[1] * (t.dim() - 1)).expand_as(t[:3])),
        lambda: t[t > 0.1],
        lambda: t.index_add(0, index, t[index]),
        lambda: t.index_put((index,), t[index] * 0.5, accumulate=True),
        lambda: t.masked_select(t < 0.3),
        lambda: torch.zeros_like(t).index_copy(0, index, t[index]),
        lambda: F.cross_entropy(t, t.argmax(1)),
        lambda: t * index.sum().item(),
    )
    m.push(choose(tables, c)())


def layer(m, a, b, c):
    x = m.pick(a, lambda t: is_float(t) and t.dim() == 3 and t.shape[1] > 1)
    weight = m.pick(b, lambda t: alike(x)(t) and t.shape[0] <= x.shape[0])
    tables = (
        lambda: F.conv1d(x, weight[:, :, :2], weight[:, 0, 0]),
        lambda: F.max_pool1d(x, 2, return_indices=True),
        lambda: F.group_norm(x, 1, weight[0, :, 0] * 2, weight[1, :, 0] * 2),
        lambda: F.avg_pool1d(x, 2),
        lambda: F.instance_norm(x),
        lambda: F.conv_transpose1d(x, weight.transpose(0, 1)[:, :, :2]),
        lambda: F.interpolate(x, scale_factor=2, mode="linear"),
        lambda: F.pad(x, (1, 1), mode="circular"),
        lambda: F.unfold(x[:, :, None], (1, 2)),
    )
    m.push(choose(tables, c)())


def batch_norm(m, a, b, c):
    x = m.pick(a, lambda t: is_float(t) and t.dim() in (2, 3) and t.shape[0] > 1)
    one = x[0, :, 0] if x.dim() == 3 else x[0]
    stats = [m.slot(o, lambda t: alike(one)(t) and not t.requires_grad) for o in (b, c)]
    if c % 4 > 0:
        for slot in stats:
            m.touch(slot, silent=True)
    m.push(F.batch_norm(x, stats[0].tensor, stats[1].tensor, training=c % 4 > 0))


# Views and aliases.

VIEWS = (
    lambda t, d, n: t.transpose(d, -1), lambda t, d, n: t.narrow(d, n - n // 2, n // 2),
    lambda t, d, n: t.select(d, n // 2), lambda t, d, n: t.view(-1), lambda t, d, n: t[..., ::2],
    lambda t, d, n: t.unsqueeze(d), lambda t, d, n: t.squeeze(d), lambda t, d, n: t.detach(),
    lambda t, d, n: t.expand(2, *t.shape), lambda t, d, n: t.diagonal(), lambda t, d, n: t[:],
    lambda t, d, n: t.as_strided((2, 2), (1, 1), t.storage_offset()), lambda t, d, n: t[1:],
    lambda t, d, n: t.unfold(d, min(n, 2), 1), lambda t, d, n: t.split(2, d),
    lambda t, d, n: t.chunk(2, d), lambda t, d, n: t.unbind(d), lambda t, d, n: t.view_as(t),
    lambda t, d, n: t.reshape(t.shape[::-1]), lambda t, d, n: t.movedim(d, 0),
    lambda t, d, n: t.tensor_split(3, d), lambda t, d, n: t, lambda t, d, n: t.detach()[:1],
    lambda t, d, n: t.view(torch.int32), lambda t, d, n: t.detach().requires_grad_(),
)  # fmt: skip
OWN_COUNTERS = (
    lambda t: t.data, lambda t: t.data[:1], lambda t: torch.unsafe_chunk(t, 2),
    lambda t: torch.unsafe_split(t, 1),
)  # fmt: skip
CASTS = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex128)


def view(m, a, b, c):
    m.map(a, is_vector, lambda t: choose(VIEWS, b)(t, c % t.dim(), t.shape[c % t.dim()]))


def alias_with_own_counter(m, a, b, c):
    m.map(a, is_vector, choose(OWN_COUNTERS, b), own=True)


def cast(m, a, b, c):
    m.map(a, is_float, lambda t: t.to(CASTS[b % len(CASTS)]))


def use_complex(m, a, b, c):
    z = m.slot(a, lambda t: t.is_complex() or (is_vector(t) and t.shape[-1] == 2))
    if not z.tensor.is_complex():
        m.push(torch.view_as_complex(z.tensor.contiguous()), z)
        return
    makes = (
        torch.view_as_real, torch.conj, lambda t: t.conj().imag, torch.angle, torch.abs, torch.exp,
        lambda t: t * t.conj(), lambda t: t.real, lambda t: t.mH if t.dim() == 2 else t * 1j,
        lambda t: t.conj().resolve_conj(), lambda t: t.conj() * t.sin(), lambda t: t @ t.mH,
    )  # fmt: skip
    writes = (
        lambda t: t.mul_(0.5), lambda t: t.conj().mul_(0.5j), lambda t: t.imag.add_(0.1),
        lambda t: t.conj().imag.mul_(0.5), lambda t: t.real.copy_(t.imag),
    )  # fmt: skip
    if c % 4:
        m.push(choose(makes, b)(z.tensor), z)
    else:
        m.touch(z)
        choose(writes, b)(z.tensor)


def forget(m, a, b, c):
    if len(m.pool) < 4:
        raise Skip
    start = a * len(m.pool) >> 8
    m.drop(m.pool[start : start + 1 + b % 3])


# Factories and random numbers.


def by_numpy(t):
    t.numpy()[...] = 0.4
    return t


def factory(m, a, b, c):
    options = {"dtype": m.dtype}
    shape = choose(((3, 4), (4,), (4, 4), (2, 3, 4), (3, 4)), c)
    empty = torch.empty(shape, **options)
    tables = (
        lambda: torch.zeros(shape, **options), lambda: torch.ones(shape, **options),
        lambda: torch.full(shape, 0.3, **options), lambda: torch.arange(4, **options),
        lambda: torch.linspace(0, 1, 4, **options), lambda: torch.eye(4, **options),
        lambda: torch.randn(shape, **options), lambda: empty.fill_(0.6), lambda: empty.zero_(),
        lambda: torch.rand(shape, generator=m.generator, **options), lambda: empty.uniform_(),
        lambda: torch.zeros(shape, **options).add_(1), lambda: empty.copy_(m.pick(a, fits(empty))),
        lambda: by_numpy(torch.empty(shape, **options)), lambda: by_numpy(torch.zeros(shape)),
        lambda: torch.zeros(shape, **options).requires_grad_(), lambda: torch.ones_like(empty),
        lambda: torch.randperm(3), lambda: torch.randint(0, 3, (4,)), lambda: empty.new_ones(4),
        lambda: torch.nn.Parameter(torch.ones(shape, **options)), lambda: torch.tensor([0.2, 1]),
        lambda: torch.zeros(shape, **options)[:1], lambda: torch.rand_like(empty),
    )  # fmt: skip
    m.push(choose(tables, b)())


def drawn(m, a, b, c):
    g = m.generator if c % 2 else None
    tables = (
        lambda t: F.dropout(t, 0.4), lambda t: torch.rand_like(t) * t, torch.randn_like,
        lambda t: torch.bernoulli(t.sigmoid(), generator=g), lambda t: F.rrelu(t, training=True),
        lambda t: torch.normal(t, 1.0, generator=g), lambda t: F.alpha_dropout(t, 0.3, True),
        lambda t: t.softmax(-1).multinomial(2, generator=g), lambda t: F.gumbel_softmax(t),
        lambda t: torch.poisson(t.abs(), generator=g), lambda t: F.dropout1d(t[None], 0.5),
        lambda t: torch.nn.init.normal_(torch.empty_like(t)) * t, lambda t: F.dropout(t, 0.0),
    )  # fmt: skip
    if c % 32 == 31:
        torch.manual_seed(b)
    m.map(a, is_vector, choose(tables, b))
