"""Sparse training in PyTorch Lightning is one callback, with or without AGENT. Its state is in every checkpoint."""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import equipoise as eq
from equipoise.integrations.lightning import SparseTraining

digits = load_digits()  # 1,797 handwritten digits of 8 x 8 pixels
split = train_test_split(digits.data.astype("float32") / 16, digits.target, random_state=0)
x_train, x_test, y_train, y_test = map(torch.tensor, split)
loader = DataLoader(TensorDataset(x_train, y_train), batch_size=50, shuffle=True)


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self.network(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.003)


torch.manual_seed(0)
module = Digits()
sparse = SparseTraining(eq.RigL(sparsity=0.9, every=20), eq.Agent(gamma=0.1))
trainer = pl.Trainer(max_epochs=6, accelerator="cpu", callbacks=[sparse], logger=False, enable_progress_bar=False)
trainer.fit(module, loader)  # after an interruption: trainer.fit(module, loader, ckpt_path="last")

with torch.no_grad():
    accuracy = (module.network(x_test).argmax(1) == y_test).float().mean().item()
print(sparse.topology)
print(f"test accuracy {accuracy:.1%}; logged: density {trainer.callback_metrics['density']:.1%}")
