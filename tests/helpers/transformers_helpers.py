"""The problem of `framework_helpers`, and a small BERT, in the Hugging Face Trainer."""

from __future__ import annotations

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from equipoise.integrations.transformers import SparseTrainer, SparseTraining
from framework_helpers import BATCH, BATCHES, CLIP, EPOCHS, RATE, data, network, topology

gc.freeze()  # every training of accelerate collects garbage, which takes a second with all that is imported here


class Model(nn.Module):
    """The network as a model of the Trainer, which returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset[dict[str, Tensor]]):
    """The examples by the names of the model's arguments."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: column[i] for name, column in self.columns.items()}


def rows() -> Rows:
    x, y = data().tensors
    return Rows(x=x, labels=y)


def sentences() -> Rows:
    tokens = torch.randint(20, (BATCH * BATCHES, 6), generator=torch.Generator().manual_seed(5))
    return Rows(input_ids=tokens, labels=(tokens.sum(1) > 57).long())


def bert() -> BertForSequenceClassification:
    """A BERT with dropout."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 8}
    return BertForSequenceClassification(BertConfig(num_hidden_layers=1, num_attention_heads=2, **sizes))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


class StopAfter(TrainerCallback):
    """Saves and ends `train` after some optimizer steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._steps:
            control.should_save = control.should_training_stop = True


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    fixed = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    size = {"per_device_train_batch_size": BATCH, "num_train_epochs": EPOCHS, "max_grad_norm": CLIP}
    return TrainingArguments(str(folder), **{**fixed, **size, **options})


def plain_sgd(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


def train(
    folder: Path,
    correction: Any = None,
    *,
    model: nn.Module | None = None,
    dataset: Rows | None = None,
    callback: bool = False,
    stop_after: int = 0,
    resume: str | bool | None = None,
    **options: Any,
) -> tuple[Any, SparseTraining]:
    """Train the problem, or another model, with `SparseTrainer` or with the callback alone."""
    model = model or Model()
    optimizers = plain_sgd(model) if isinstance(model, Model) else (None, None)
    common = {
        "model": model,
        "args": arguments(folder, **options),
        "train_dataset": dataset or rows(),
        "optimizers": optimizers,
    }
    stop = [StopAfter(stop_after)] if stop_after else []
    algorithm = topology(initial_mask="random")  # attaching to the loaded weights would lose some
    if callback:
        sparse = SparseTraining(algorithm, correction)
        trainer = Trainer(**common, callbacks=[sparse, *stop])
    else:
        trainer = SparseTrainer(**common, callbacks=stop, topology=algorithm, correction=correction)
        sparse = trainer.sparse_training
    trainer.train(resume_from_checkpoint=resume)
    return trainer, sparse
