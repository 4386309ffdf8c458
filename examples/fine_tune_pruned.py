"""Fine-tune a model that somebody has pruned: its zeros stay zero, whatever the optimizer does."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.functional import cross_entropy
from torch.nn.utils import prune

import equipoise as eq

digits = load_digits()  # 1,797 handwritten digits of 8 x 8 pixels
split = train_test_split(digits.data.astype("float32") / 16, digits.target, random_state=0)
x_train, x_test, y_train, y_test = map(torch.tensor, split)


def network():
    return torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))


def fit(model, optimizer, steps):
    for _ in range(steps):
        batch = torch.randint(len(x_train), (100,))
        cross_entropy(model(x_train[batch]), y_train[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def accuracy(model):
    return (model(x_test).argmax(1) == y_test).float().mean().item()


# Somebody trains a dense model, removes 95 % of its weights and publishes the rest.
torch.manual_seed(0)
dense = network()
fit(dense, torch.optim.AdamW(dense.parameters(), lr=0.003), 200)
print(f"dense       {accuracy(dense):.1%}")
for layer in (dense[0], dense[2]):
    prune.l1_unstructured(layer, "weight", amount=0.95)
    prune.remove(layer, "weight")
torch.save(dense.state_dict(), "pruned.pt")
print(f"pruned      {accuracy(dense):.1%}")

# You load it and fine-tune what is left.
model = network()
model.load_state_dict(torch.load("pruned.pt"))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
topology = eq.Static.from_nonzeros().attach(model, optimizer)
fit(model, optimizer, 200)
print(f"fine-tuned  {accuracy(model):.1%}")
print(topology)
