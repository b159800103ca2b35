"""Small real models with random weights: their configurations, inputs and blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.utils import parametrizations, rnn

Batch = dict[str, torch.Tensor]
VOCABULARY = 61
PADDING = 0


def sgd(parameters, **settings):
    return torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, **settings
    )


def adamw(parameters, **settings):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, **settings)


@dataclass(frozen=True)
class Family:
    """How to build and train a model.

    Called with a batch as keyword arguments, it returns a loss or an object with a `loss`.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    blocks: str | tuple[str, ...]  # patterns for ebb.apply
    optimizer: Callable[..., torch.optim.Optimizer] = adamw


def tokens() -> Batch:
    ids = torch.randint(3, VOCABULARY, (2, 9))
    return {"input_ids": ids, "labels": ids}


def padded_tokens() -> Batch:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    ids = torch.randint(3, VOCABULARY, (2, 9)) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def token_pairs() -> Batch:
    return {**padded_tokens(), "labels": torch.randint(3, VOCABULARY, (2, 7))}


def images() -> Batch:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 5, (2,))}


def pictures() -> Batch:
    return {"x": torch.randn(4, 3, 16, 16)}


# transformers ------------------------------------------------------------------------------------

WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
TEXT = {
    **WIDTHS,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
    "pad_token_id": PADDING,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = {**TEXT, "num_key_value_heads": 2, "attention_dropout": 0.1, "use_cache": False}
WINDOW = {"head_dim": 8, "sliding_window": 4}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "output_router_logits": True}
LATENT_HEADS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
GROUPED_EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,  # the first layer is dense
}


def hugging_face(batch, blocks, model, config, optimizer=adamw, **settings) -> Family:
    def build() -> nn.Module:
        # Built from its configuration, so nothing is downloaded.
        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return Family(build, batch, blocks, optimizer)


def decoder(name, batch=padded_tokens, **settings) -> Family:
    config = settings.pop("config", f"{name}Config")
    settings = {**DECODER, **settings}
    return hugging_face(batch, "model.layers.*", f"{name}ForCausalLM", config, **settings)


HUGGING_FACE = {
    "Llama": decoder("Llama", tokens),
    "Qwen2": decoder("Qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "Qwen3": decoder("Qwen3", head_dim=8),
    "Gemma2": decoder("Gemma2", **WINDOW, attn_implementation="eager"),  # soft-capped logits
    "Gemma3": decoder("Gemma3", config="Gemma3TextConfig", **WINDOW),
    # Experts: "eager" is a loop with index_add_, "grouped_mm" one grouped product.
    "Mixtral": decoder("Mixtral", tokens, **EXPERTS, experts_implementation="eager"),
    "Mixtral, grouped": decoder("Mixtral", **EXPERTS, experts_implementation="grouped_mm"),
    "Mixtral, jitter": decoder(
        "Mixtral", tokens, **EXPERTS, experts_implementation="batched_mm", router_jitter_noise=0.1
    ),
    "DeepSeek-V3": decoder(
        "DeepseekV3", **GROUPED_EXPERTS, **LATENT_HEADS, experts_implementation="eager"
    ),
    "GPT-2": hugging_face(
        tokens,
        "transformer.h.*",
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    ),
    "BERT": hugging_face(
        padded_tokens, "*.layer.?", "BertForMaskedLM", "BertConfig", type_vocab_size=2, **TEXT
    ),
    "T5": hugging_face(
        token_pairs,
        "*.block.?",
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=PADDING,
        use_cache=False,
    ),
    "ViT": hugging_face(
        images,
        ("*.layer.?", "*.layers.?"),  # the name differs between releases
        "ViTForImageClassification",
        "ViTConfig",
        **WIDTHS,
        num_hidden_layers=2,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        image_size=32,
        patch_size=8,
        num_labels=5,
    ),
    "ResNet": hugging_face(
        images,
        "*.layers.?",
        "ResNetForImageClassification",
        "ResNetConfig",
        sgd,
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[2, 1],
        num_labels=5,
    ),
    "ConvNeXt": hugging_face(
        images,
        "*.layers.?",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        num_stages=2,
        hidden_sizes=[16, 32],
        depths=[1, 2],
        drop_path_rate=0.3,
        layer_scale_init_value=0.1,
        image_size=32,
        num_labels=5,
    ),
    "Mamba": hugging_face(
        tokens,
        "*.layers.?",
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=VOCABULARY,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
        use_cache=False,
    ),
}


# torch's own modules -----------------------------------------------------------------------------


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32, padding_idx=PADDING)
        self.transformer = nn.Transformer(32, 4, 2, 2, 48, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids, attention_mask, labels):
        mask = nn.Transformer.generate_square_subsequent_mask(labels.shape[1])
        padding = torch.zeros(attention_mask.shape).masked_fill(attention_mask == 0, -torch.inf)
        y = self.transformer(
            self.embedding(input_ids),
            self.embedding(labels),
            tgt_mask=mask,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return F.cross_entropy(self.head(y).flatten(0, 1), labels.flatten())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16, max_norm=1.0)
        self.lstm = nn.LSTM(16, 12, 2, dropout=0.2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(24, 16, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids, attention_mask, labels):
        lengths = attention_mask.sum(1)
        x = rnn.pack_padded_sequence(
            self.embedding(input_ids), lengths, batch_first=True, enforce_sorted=False
        )
        x, _ = rnn.pad_packed_sequence(self.lstm(x)[0], batch_first=True)
        x, last = self.gru(x)
        logits = self.head(x + last[-1].unsqueeze(1))
        return F.cross_entropy(logits.flatten(0, 1), labels[:, : x.shape[1]].flatten())


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Dropout2d(0.2),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width, momentum=None),  # a cumulative average
        )

    def forward(self, x):
        return F.relu_(self.body(x).add_(x))


class ResidualNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Hardswish(True))
        self.blocks = nn.Sequential(Residual(8), nn.MaxPool2d(2), Residual(8))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 49, 6), nn.BatchNorm1d(6), nn.ELU())

    def forward(self, x):
        return self.head(self.blocks(self.stem(x))).square().mean()


class Stage(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.convolution = nn.Conv2d(inside, outside, 3, padding=1)
        self.norm = nn.GroupNorm(2, outside)
        self.time = nn.Linear(16, 2 * outside)

    def forward(self, x, time):
        scale, shift = self.time(time)[:, :, None, None].chunk(2, 1)
        return F.relu(self.norm(self.convolution(x)) * (1 + scale) + shift, inplace=True)


class Denoiser(nn.Module):
    """A U-Net for diffusion: predicts the noise in its input."""

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(inplace=True), nn.Linear(16, 16))
        self.down = nn.ModuleList([Stage(3, 8), Stage(8, 16)])
        self.middle = Stage(16, 16)
        self.up = nn.ModuleList([Stage(32, 8), Stage(16, 8)])
        self.out = nn.Conv2d(8, 3, 1)
        self.register_buffer("alpha", torch.linspace(0.99, 0.1, 50))

    def forward(self, x):
        step = torch.randint(0, 50, (x.shape[0],), device=x.device)
        angles = step[:, None] * torch.exp(torch.arange(8) * -0.5)
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        alpha = self.alpha[step][:, None, None, None]
        noise = torch.randn_like(x)
        h, skips = alpha.sqrt() * x + (1 - alpha).sqrt() * noise, []
        for stage in self.down:
            h = stage(h, time)
            skips.append(h)
            h = F.max_pool2d(h, 2)
        h = self.middle(h, time)
        for stage in self.up:
            h = F.interpolate(h, scale_factor=2, mode="bilinear")
            h = stage(torch.cat([h, skips.pop()], 1), time)
        return F.mse_loss(self.out(h), noise)


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(
            [nn.EmbeddingBag(VOCABULARY, 16, mode=mode) for mode in ("sum", "mean", "max")]
        )
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, add_bias_kv=True)

    def forward(self, input_ids, labels):
        offsets = torch.tensor([0, 3, 3, 8])
        weights = torch.rand(input_ids.numel()) + 0.5
        bags = [
            bag(input_ids.flatten(), offsets, weights if bag.mode == "sum" else None)
            for bag in self.bags
        ]
        x = torch.stack(bags)
        y, seen = self.attention(x, x, x, average_attn_weights=False)
        return (y - x).square().mean() + seen.square().sum() + labels[0, 0] * 0


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(
            parametrizations.spectral_norm(nn.Conv2d(3, 8, 3)),
            nn.LeakyReLU(0.2, inplace=True),
            parametrizations.weight_norm(nn.Conv2d(8, 8, 3, stride=2)),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
            nn.PReLU(),
        )
        self.head = nn.Sequential(
            nn.utils.spectral_norm(nn.Linear(288, 8)),
            nn.RReLU(inplace=True),
            nn.AlphaDropout(0.1),
            parametrizations.orthogonal(nn.Linear(8, 8)),
        )

    def forward(self, x):
        return self.head(self.convolutions(x).flatten(1)).exp().mean()


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.GroupNorm(2, 16),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(256, 8),
            nn.Softplus(),
            nn.Dropout(0.1),
            nn.Linear(8, 1),
        )

    def forward(self, x):
        return self.layers(x)


def generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 256),
        nn.Unflatten(1, (16, 4, 4)),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1),
        nn.Tanh(),
    )


TORCH = {
    "nn.Transformer": Family(Translator, token_pairs, "*.layers.?"),
    "LSTM and GRU": Family(Recurrent, padded_tokens, ("lstm", "gru")),
    "Conv and BatchNorm": Family(ResidualNet, pictures, ("stem", "blocks.?", "head"), sgd),
    "U-Net": Family(Denoiser, pictures, ("down.?", "middle", "up.?")),
    "EmbeddingBag and attention": Family(Bags, tokens, ("bags.?", "attention"), sgd),
    "weight and spectral norm": Family(Normed, pictures, ("convolutions", "head"), sgd),
}

FAMILIES = HUGGING_FACE | TORCH
