"""An ordinary Accelerate script: a small transformer on random tokens. It does not know of ebb.

python train.py [--checkpoint]
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 192)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(192, 4, 512, dropout=0.1, batch_first=True) for _ in range(6)
        )
        self.head = nn.Linear(192, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            if "--checkpoint" in sys.argv:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return self.head(x)


accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(torch.randint(0, 256, (32, 384)), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

losses = []
for tokens in loader:
    with accelerator.accumulate(model):
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
total = sum(p.double().abs().sum().item() for p in model.parameters())
status = Path("/proc/self/status").read_text()  # getrusage would include the parent's peak
peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
print(json.dumps({"losses": losses, "norms": [total], "peak_mib": peak}))
