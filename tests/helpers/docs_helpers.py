"""The code blocks of README and docs, and the variables that they may use without defining them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import equipoise as eq

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"(?:<!-- (?P<mark>slow|fresh|not run: [^\n]+) -->\n\s*)?^(?P<indent> *)```(?P<language>\w*)[^\n]*\n"
    r"(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A code block.

    Attributes:
        page: Its page, relative to the repository.
        section: Number of `##` headings before it.
        line: Number of lines before its code.
        language: The word after the fence; empty if there is none.
        code: Its text.
        mark: `slow`, `fresh`, `not run: REASON` or nothing, from a comment in the line before the block.
    """

    page: str
    section: int
    line: int
    language: str
    code: str
    mark: str


def blocks(page: Path) -> list[Block]:
    """Return the code blocks of a page."""
    text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix()
    found = []
    for match in FENCE.finditer(text):
        before = text[: match.start("code")]
        section = len(re.findall(r"^## ", before, re.MULTILINE))
        code = textwrap.dedent(match["code"])
        found.append(Block(name, section, before.count("\n"), match["language"], code, match["mark"] or ""))
    return found


def run_python(chosen: list[Block], variables: dict[str, Any]) -> None:
    """Execute blocks of a page in order; a traceback names the page and its line.

    Blocks of one section share their variables. A new section, or a block that is marked
    `fresh`, begins with those of `small_world`; imports stay. Blocks with the `Trainer` of a framework also find what
    it trains.
    """
    section = None
    for block in chosen:
        if block.section != section or block.mark == "fresh":
            variables.update(small_world())
            section = block.section
        for framework, world in FRAMEWORKS.items():
            if f"from {framework} import Trainer" in block.code:
                variables.update(world())
        exec(compile("\n" * block.line + block.code, block.page, "exec"), variables)


def small_world() -> dict[str, Any]:
    """Return what the pages take for granted: imports, a model, its optimizer, data, a loss and a number of epochs."""
    torch.manual_seed(0)
    images, labels = torch.rand(8, 3, 32, 32), torch.arange(8)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(14400, 10))
    loader = DataLoader(TensorDataset(images, labels), batch_size=4)
    epochs = 2
    return {
        "torch": torch,
        "nn": nn,
        "eq": eq,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "images": images.numpy(),
        "loader": loader,
        "batches": list(loader),
        "loss_fn": lambda model, x, y: cross_entropy(model(x), y),
        "epochs": epochs,
        "steps": epochs * len(loader),
    }


def lightning_world() -> dict[str, Any]:
    """Return the module that README trains with Lightning."""
    from lightning.pytorch import LightningModule

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = small_world()["model"]

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            return cross_entropy(self.network(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return {"module": Classifier()}


def transformers_world() -> dict[str, Any]:
    """Return the model, its data and the arguments that README gives to the Trainer of Hugging Face."""
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    size = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 8, "bos_token_id": 0, "eos_token_id": 0}
    return {
        "model": GPT2LMHeadModel(GPT2Config(vocab_size=16, **size)),
        "args": TrainingArguments("runs/gpt2", num_train_epochs=1, report_to="none", use_cpu=True),
        "data": [{"input_ids": row, "labels": row} for row in torch.randint(16, (20, 8))],
    }


FRAMEWORKS = {"lightning.pytorch": lightning_world, "transformers": transformers_world}
