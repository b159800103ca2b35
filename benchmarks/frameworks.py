"""Measures frameworks' own checkpointing, and the same calls as regions (EBB=1).

Prints step time, bytes held for backward and peak, and compares gradients with eager's. One process
on the CPU:

    pip install --no-deps megatron-core einops peft timm diffusers open_clip_torch
    pip install --no-deps monai torchtune fairseq2 && pip install deepspeed pillow
    OMP_NUM_THREADS=1 python benchmarks/frameworks.py

Frameworks that are not installed are left out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from held_bytes import held_and_peak_of
from report import table
from timing import interleaved, steady_memory
from torch import Tensor, nn
from torch.nn import functional as F

import ebb
from ebb._launch import takeover

INTEGRATION = Path(__file__).resolve().parents[1] / "integration"
sys.path.append(str(INTEGRATION.parent / "tests"))

from ebb_tests.frameworks.own_checkpointing import absent, bare_packages  # noqa: E402

WIDTH, TOKENS, ROWS, LAYERS, WORDS = 256, 128, 4, 4, 256
Loss = Callable[[], Tensor]
Made = tuple[nn.Module, Loss]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def stack(wrap: Callable[[Layer], Callable[[Tensor], Tensor]]) -> Made:
    """A stack of layers, and its loss. `wrap` adds checkpointing to a layer's call."""
    layers = nn.ModuleList(Layer() for _ in range(LAYERS))
    calls = [wrap(layer) for layer in layers]  # type: ignore[arg-type]
    x = torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True)  # reentrant checkpoints need a grad

    def loss() -> Tensor:
        y = x
        for call in calls:
            y = call(y)
        return y.square().mean()

    return layers, loss


def megatron(**settings: Any) -> Made:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    seed()
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=8,
        use_cpu_initialization=True,
        **settings,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=config.num_moe_experts),
        WORDS,
        TOKENS,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    words = torch.randint(WORDS, (ROWS, TOKENS + 1))
    positions = torch.arange(TOKENS).expand(ROWS, TOKENS)
    hidden = torch.ones(1, 1, TOKENS, TOKENS).triu(1) > 0

    def loss() -> Tensor:
        return model(words[:, :-1], positions, hidden, labels=words[:, 1:]).mean()

    return model, loss


def megatron_full() -> Made:
    full = {"recompute_method": "uniform", "recompute_num_layers": 1}
    return megatron(recompute_granularity="full", **full)


def megatron_selective() -> Made:
    modules = ["core_attn", "layernorm"]
    return megatron(recompute_granularity="selective", recompute_modules=modules)


def deepspeed() -> Made:
    from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint

    return stack(lambda layer: lambda x: checkpoint(layer, x))


def peft(checkpoints: bool) -> Made:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        use_cache=False,
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8)).train()
    if checkpoints:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    words = torch.randint(WORDS, (ROWS, TOKENS))
    return model, lambda: model(input_ids=words, labels=words).loss


def timm(checkpoints: bool) -> Made:
    with absent("torchvision"):
        import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=128, embed_dim=WIDTH, num_heads=8, depth=LAYERS
    )
    model.set_grad_checkpointing(checkpoints)
    images = torch.randn(2 * ROWS, 3, 128, 128)
    return model, lambda: model(images).square().mean()


def diffusers(checkpoints: bool) -> Made:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    if checkpoints:
        model.enable_gradient_checkpointing()
    images = torch.randn(ROWS, 3, 32, 32)
    return model, lambda: model(images, 10).sample.square().mean()


def open_clip(checkpoints: bool) -> Made:
    with absent("torchvision", "ftfy"), bare_packages("open_clip.transformer"):
        from open_clip.transformer import Transformer

    model = Transformer(width=WIDTH, layers=LAYERS, heads=8)
    model.grad_checkpointing = checkpoints
    x = torch.randn(ROWS, TOKENS, WIDTH)
    return model, lambda: model(x).square().mean()


def torchtune() -> Made:
    with bare_packages("torchtune.training.activations"):
        from torchtune.training.activations import checkpoint_wrapper

    return stack(lambda layer: checkpoint_wrapper(layer, "full", None))


def fairseq2() -> Made:
    with bare_packages("fairseq2.models.utils.ac"):
        from fairseq2.models.utils.ac import apply_layerwise_ac

    def wrapped(layer: Layer) -> Callable[[Tensor], Tensor]:
        one = nn.ModuleList([layer])
        apply_layerwise_ac(one, 1)
        return one[0]

    return stack(wrapped)


def monai(checkpoints: bool) -> Made:
    from monai.networks.nets import SwinUNETR

    model = SwinUNETR(1, 2, feature_size=24, spatial_dims=2, use_checkpoint=checkpoints)
    image = torch.randn(1, 1, 128, 128)
    return model, lambda: model(image).square().mean()


def plain_stack() -> Made:
    return stack(lambda layer: layer)


CASES: dict[str, tuple[Callable[[], Made], Callable[[], Made]]] = {
    "Megatron-Core, full": (megatron, megatron_full),
    "Megatron-Core, core_attn and layernorm": (megatron, megatron_selective),
    "DeepSpeed checkpoint": (plain_stack, deepspeed),
    **{
        name: (functools.partial(make, False), functools.partial(make, True))
        for name, make in {
            "PEFT, LoRA": peft,
            "timm checkpoint_seq": timm,
            "diffusers UNet2DModel": diffusers,
            "OpenCLIP Transformer": open_clip,
            "MONAI SwinUNETR": monai,
        }.items()
    },
    "torchtune full": (plain_stack, torchtune),
    "fairseq2 layerwise": (plain_stack, fairseq2),
}


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Megatron-Core run without CUDA and TransformerEngine."""
    from megatron.core.tensor_parallel import random

    from ebb_tests.frameworks import megatron_on_cpu

    megatron_on_cpu.stub(monkeypatch)
    # CheckpointWithoutOutput uses these names, which TransformerEngine would provide.
    no_fp8 = SimpleNamespace(is_fp8_enabled=lambda: False)
    monkeypatch.setattr(random, "FP8GlobalStateManager", no_fp8, raising=False)
    for name in ("activation_recompute_forward", "fp8_autocast"):
        monkeypatch.setattr(random, name, lambda **_: contextlib.nullcontext(), raising=False)


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of one, and Megatron without CUDA, if Megatron is installed."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            from megatron.core import parallel_state

            on_cpu(monkeypatch)
            parallel_state.initialize_model_parallel()
        except ImportError:
            pass
        yield
        dist.destroy_process_group()


@contextlib.contextmanager
def as_regions(policy: ebb.Policy = ebb.policies.recompute_all) -> Iterator[None]:
    takeover.install(policy, "1", ())
    try:
        yield
    finally:
        takeover.remove()


def seed() -> None:
    """Seeds torch's generators and those of Megatron's RNG tracker."""
    torch.manual_seed(2)
    if random := sys.modules.get("megatron.core.tensor_parallel.random"):
        random.model_parallel_cuda_manual_seed(5, force_reset_rng=True)


class Way:
    """A model run in one way: eager, with the framework's checkpointing, or as regions."""

    def __init__(self, make: Callable[[], Made], during: Callable[[], AbstractContextManager[Any]]):
        self.during = during
        with during():
            torch.manual_seed(1)
            self.model, self.loss = make()

    def forward_and_backward(self) -> None:
        self.loss().backward()  # type: ignore[no-untyped-call]

    def step(self) -> dict[str, float]:
        with self.during():
            seed()
            start = time.perf_counter()
            self.forward_and_backward()
            return {"step": time.perf_counter() - start}

    def bits(self) -> list[Tensor]:
        self.model.zero_grad()
        self.step()
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def bytes(self) -> dict[str, int]:
        with self.during():
            return held_and_peak_of(self.loss)


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    seconds = float(os.environ.get("EBB_BENCH_SECONDS", "10"))
    with one_rank():
        for name, (plain, own) in CASES.items():
            try:
                ways = {
                    "plain": Way(plain, contextlib.nullcontext),
                    "by itself": Way(own, contextlib.nullcontext),
                    "EBB=1": Way(own, as_regions),
                }
                expected = ways["plain"].bits()
                same = {
                    key: all(map(torch.equal, way.bits(), expected)) for key, way in ways.items()
                }
            except (ImportError, pytest.skip.Exception) as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                continue
            sizes = {key: way.bytes() for key, way in ways.items()}
            with steady_memory():
                times = interleaved({key: way.step for key, way in ways.items()}, seconds)
            for key in ways:
                ratio = times[key]["step"].least / times["plain"]["step"].least
                held, peak = (sizes[key][f"{what}_bytes"] / 2**20 for what in ("held", "peak"))
                exact = "yes" if same[key] else "no"
                rows.append([name, key, f"{ratio:.2f}", f"{held:.1f}", f"{peak:.1f}", exact])
    print(table(["", "", "time", "held MiB", "peak MiB", "identical"], rows))


if __name__ == "__main__":
    main()
