"""An ordinary Trainer script: a small Llama on random tokens. It does not know of ebb.

python train.py [--gradient-checkpointing] [--steps 3] [--length 384]
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
import transformers

parser = argparse.ArgumentParser()
parser.add_argument("--gradient-checkpointing", action="store_true")
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--length", type=int, default=384)
options = parser.parse_args()

transformers.set_seed(0)
model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
)
tokens = torch.randint(0, 256, (8 * options.steps, options.length))
data = [{"input_ids": row, "labels": row} for row in tokens]

with tempfile.TemporaryDirectory() as folder:
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=8,
            num_train_epochs=1,
            logging_steps=1,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
            gradient_checkpointing=options.gradient_checkpointing,
        ),
        train_dataset=data,
    )
    result = trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
status = Path("/proc/self/status").read_text()  # getrusage would include the parent's peak
peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
print(json.dumps({"losses": losses, "norms": norms, "peak_mib": peak,
                  "seconds": result.metrics["train_runtime"]}))  # fmt: skip
