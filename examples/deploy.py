"""Train a sparse convolutional network and ship it as a small file that runs with the sparse kernels."""

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.functional import cross_entropy

import equipoise as eq

digits = load_digits()  # 1,797 handwritten digits of 8 x 8 pixels
split = train_test_split(digits.images[:, None].astype("float32") / 16, digits.target, random_state=0)
x_train, x_test, y_train, y_test = map(torch.tensor, split)


def network():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(1024, 10),
    )  # fmt: skip


@torch.no_grad()
def accuracy(model):
    return (model(x_test).argmax(1) == y_test).float().mean().item()


torch.manual_seed(0)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
topology = eq.SET(sparsity=0.95, every=20).attach(model, optimizer, total_steps=200)
for _ in range(200):
    batch = torch.randint(len(x_train), (50,))
    cross_entropy(model(x_train[batch]), y_train[batch]).backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()

torch.save(model.state_dict(), "dense.pt")
eq.save(model, "digits.safetensors", values="int8", force=True)  # only the nonzeros, in eight bits
deployed = eq.load("digits.safetensors", into=network())

dense, small = (Path(name).stat().st_size for name in ("dense.pt", "digits.safetensors"))
print(f"{topology.density:.0%} of the weights, {small:,} instead of {dense:,} bytes")
print(f"test accuracy {accuracy(model):.1%} before, {accuracy(deployed):.1%} deployed")
