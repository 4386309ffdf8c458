"""Train a network that is 90 % sparse from the first step, in a plain PyTorch loop, with RigL and AGENT."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import equipoise as eq

digits = load_digits()  # 1,797 handwritten digits of 8 x 8 pixels
split = train_test_split(digits.data.astype("float32") / 16, digits.target, random_state=0)
x_train, x_test, y_train, y_test = map(torch.tensor, split)
loader = DataLoader(TensorDataset(x_train, y_train), batch_size=50, shuffle=True)
epochs = 8

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
topology = eq.RigL(sparsity=0.9, every=20).attach(model, optimizer, total_steps=epochs * len(loader))
agent = eq.Agent(gamma=0.1).attach(model, topology)


def loss_fn(model, x, y):
    return cross_entropy(model(x), y)


for _ in range(epochs):
    agent.refresh(loader, loss_fn)  # snapshot, full gradient, coefficient
    for x, y in loader:
        agent.backward(loss_fn, x, y)  # .grad holds the corrected gradient
        optimizer.step()  # inactive weights stay exactly zero
        optimizer.zero_grad()

with torch.no_grad():
    accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
print(topology)
print(f"test accuracy {accuracy:.1%}, {topology.exploration:.0%} of the weights were tried")
