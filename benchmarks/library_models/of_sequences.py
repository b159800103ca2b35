"""Models of text, sound and graphs."""

from __future__ import annotations

import functools
import os
import tempfile
from typing import Any

import torch
from budget_jobs import models_of_transformers
from torch import Tensor, nn

from library_models.case import LARGER, add, images, noise, steps, words

# torch --------------------------------------------------------------------------------------------

add(
    "torch",
    "TransformerEncoder",
    lambda torch_nn: torch_nn.TransformerEncoder(
        torch_nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 6
    ),
    noise(8, 64, 64),
)
add(
    "torch",
    "Transformer",
    lambda torch_nn: torch_nn.Transformer(64, 4, 3, 3, 256, batch_first=True),
    lambda: (torch.randn(8, 64, 64), torch.randn(8, 64, 64)),
)
add(
    "torch",
    "Sequential of Sequentials",
    lambda torch_nn: torch_nn.Sequential(
        *(
            torch_nn.Sequential(torch_nn.Linear(64, 256), torch_nn.GELU(), torch_nn.Linear(256, 64))
            for _ in range(6)
        )
    ),
    noise(512, 64),
)


# transformers -------------------------------------------------------------------------------------

TRANSFORMERS = (
    "Llama Gemma2 Mixtral Bert Albert DebertaV2 DistilBert GPT2 Bloom Mamba T5 Bart Whisper ViT"
    " Swin ConvNext ResNet SegFormer PoolFormer CLIP Wav2Vec2"
)
WHY_OF_TRANSFORMERS = {
    "Swin": LARGER.format("a stage"),
    "T5": "regions keep the constants from which T5 computes indices of relative positions, 8 "
    "bytes for each pair of positions, and one tensor more than checkpointing does",
}


def of_transformers(name: str) -> None:
    batch = models_of_transformers.HUGGING_FACE[name][1]
    has_none = ("Albert", "ConvNext", "ResNet", "PoolFormer")
    own = None if name in has_none else "gradient_checkpointing_enable"
    make = functools.partial(models_of_transformers.build, name=name)
    add("transformers", name, make, batch, own, WHY_OF_TRANSFORMERS.get(name, ""))


for _name in TRANSFORMERS.split():
    of_transformers(_name)

# sentence-transformers ----------------------------------------------------------------------------


TEXT_OF_BERT = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 64,
}


def sentences(of: Any) -> Any:
    """A small BERT with pooling, saved to a folder and loaded, as trained models are."""
    from sentence_transformers import models
    from transformers import BertConfig, BertModel, BertTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        vocabulary = os.path.join(folder, "vocab.txt")
        with open(vocabulary, "w") as file:
            file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]))
        BertTokenizerFast(vocabulary).save_pretrained(folder)
        BertModel(BertConfig(**TEXT_OF_BERT)).save_pretrained(folder)
        parts = [models.Transformer(folder), models.Pooling(64), models.Dense(64, 32)]
        return of.SentenceTransformer(modules=parts, device="cpu")


def sentence_batch() -> Any:
    ids = torch.randint(5, 13, (16, 48))
    return ({"input_ids": ids, "attention_mask": torch.ones_like(ids)},)


add(
    "sentence-transformers",
    "SentenceTransformer",
    sentences,
    sentence_batch,
    "gradient_checkpointing_enable",
)

# torchaudio ---------------------------------------------------------------------------------------

add(
    "torchaudio",
    "Conformer",
    lambda of: of.Conformer(32, 4, 64, 4, 15),
    lambda: (torch.randn(4, 64, 32), torch.full((4,), 64)),
)
add(
    "torchaudio",
    "Emformer",
    lambda of: of.Emformer(32, 4, 64, 4, 8, right_context_length=2),
    lambda: (torch.randn(4, 66, 32), torch.full((4,), 66)),
)
add(
    "torchaudio",
    "ConvTasNet",
    lambda of: of.ConvTasNet(2, 8, 64, 3, 32, 64, 4, 2),
    noise(2, 1, 2000),
)
add(
    "torchaudio",
    "wav2vec2_base",
    lambda of: of.wav2vec2_base(encoder_layer_drop=0.0, aux_num_out=20),
    noise(1, 8000),
)
add("torchaudio", "Wav2Letter", lambda of: of.Wav2Letter(20, "mfcc", 13), noise(4, 13, 200))
add(
    "torchaudio",
    "HDemucs",
    lambda of: of.HDemucs(["a", "b"], nfft=1024, depth=4, channels=8),
    noise(1, 2, 16384),
)
add("torchaudio", "DeepSpeech", lambda of: of.DeepSpeech(32, 128, 20), noise(4, 1, 100, 32))

# peft ---------------------------------------------------------------------------------------------


def adapted(of: Any) -> Any:
    import transformers

    base = models_of_transformers.build(transformers, "Llama")
    return of.get_peft_model(base, of.LoraConfig(target_modules=["q_proj", "v_proj", "up_proj"]))


def checkpoint_adapted(model: Any) -> None:
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()


add("peft", "Llama with LoRA", adapted, models_of_transformers.words, checkpoint_adapted)

# x-transformers -----------------------------------------------------------------------------------

add(
    "x-transformers",
    "decoder",
    lambda of: of.TransformerWrapper(
        num_tokens=100,
        max_seq_len=64,
        attn_layers=of.Decoder(dim=64, depth=4, heads=4, rotary_pos_emb=True),
    ),
    words(4, 64),
)
add(
    "x-transformers",
    "encoder and decoder",
    lambda of: of.XTransformer(
        dim=64,
        enc_num_tokens=100,
        enc_depth=3,
        enc_heads=4,
        enc_max_seq_len=64,
        dec_num_tokens=100,
        dec_depth=3,
        dec_heads=4,
        dec_max_seq_len=64,
    ),
    lambda: (torch.randint(100, (4, 64)), torch.randint(100, (4, 64))),
)
add(
    "x-transformers",
    "vision",
    lambda of: of.ViTransformerWrapper(
        image_size=64, patch_size=8, attn_layers=of.Encoder(dim=64, depth=4, heads=4)
    ),
    images(4, 64),
)

# Others -------------------------------------------------------------------------------------------


def graph() -> Any:
    return torch.randn(256, 16), torch.randint(256, (2, 1024))


class DeepGcn(nn.Module):
    """A ModuleList of the library's layers, as in the library's example."""

    def __init__(self, of: Any, **more: Any) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.layers = nn.ModuleList(
            of.DeepGCNLayer(of.GENConv(64, 64), nn.LayerNorm(64), nn.ReLU(), **more)
            for _ in range(4)
        )

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, edges)
        return x


add("torch_geometric", "GAT", lambda of: of.GAT(16, 64, 4, heads=4), graph)
add("torch_geometric", "GIN", lambda of: of.GIN(16, 64, 4), graph)
add("torch_geometric", "DeepGCNLayer", DeepGcn, graph, {"ckpt_grad": True})
add(
    "lightning",
    "Transformer",
    lambda of: of.LightningTransformer(100),
    lambda: (torch.randint(100, (4, 32)), torch.randint(100, (4, 32))),
)
add("conformer", "Conformer", lambda of: of.Conformer(64, depth=3, heads=4), noise(4, 64, 64))
add(
    "denoising-diffusion-pytorch",
    "Unet",
    lambda of: of.Unet(16, dim_mults=(1, 2, 4), flash_attn=False),
    lambda: (torch.randn(2, 3, 32, 32), steps()),
)
add("neuraloperator", "FNO", lambda of: of.FNO((8, 8), 1, 1, 16, n_layers=4), images(4, 32, 1))
add(
    "efficientnet-pytorch",
    "EfficientNet-B0",
    lambda of: of.EfficientNet.from_name("efficientnet-b0"),
    images(4, 64),
)
add("encodec", "encoder", lambda of: of.modules.SEANetEncoder(n_filters=8), noise(1, 1, 8000))
add(
    "kornia",
    "VisionTransformer",
    lambda of: of.VisionTransformer(64, 8, embed_dim=64, depth=4, num_heads=4),
    images(4, 64),
)
