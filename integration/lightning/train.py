"""An ordinary Lightning script: a small transformer on random tokens. It does not know of ebb.

python train.py [--checkpoint] [--ddp]
"""

import json
import sys
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 192)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(192, 4, 512, dropout=0.1, batch_first=True) for _ in range(6)
        )
        self.head = nn.Linear(192, 256)
        self.losses: list[float] = []

    def training_step(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            if "--checkpoint" in sys.argv:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0, verbose=False)
model = Model()
loader = torch.utils.data.DataLoader(torch.randint(0, 256, (24, 384)), batch_size=8)
trainer = lightning.Trainer(
    max_epochs=1,
    **({"accelerator": "cpu", "devices": 2, "strategy": "ddp"} if "--ddp" in sys.argv else {}),
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, loader)
total = sum(p.double().abs().sum().item() for p in model.parameters())
status = Path("/proc/self/status").read_text()  # getrusage would include the parent's peak
peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
print(json.dumps({"losses": model.losses, "norms": [total], "peak_mib": peak}))
