"""Hugging Face Transformers: sparse training as a callback, or as a `Trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from equipoise.errors import UserError
from equipoise.integrations.attachment import Attachment
from equipoise.topology import Algorithm
from equipoise.training import checkpoint
from equipoise.world import ALONE, World

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ModuleNotFoundError:
    raise UserError("Transformers is not installed; pip install 'equipoise[transformers]'") from None

FILE = "equipoise.safetensors"  # in the folder of a checkpoint


class SparseTraining(Attachment, TrainerCallback):
    """Makes the model of a `Trainer` sparse from the first step of `train` to the last.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[SparseTraining(eq.RigL(sparsity=0.9))])
        trainer.train()

    Masks, exploration and counters are saved in the folder of each checkpoint, as `equipoise.safetensors`.
    `trainer.train(resume_from_checkpoint=True)` ends with the weights of an uninterrupted run. `density` and
    `exploration` are logged with the loss.

    A callback is not told the folder that training resumes from. It expects the one that this `Trainer` would write,
    `output_dir/checkpoint-STEP`. To resume from another folder, use `SparseTrainer` or give `resume_from`.

    Args:
        algorithm: The topology, such as `eq.RigL(sparsity=0.9)`.
        total_steps: Number of optimizer steps of the whole training; by default that of the `Trainer`.
        resume_from: Folder of the checkpoint that training resumes from, if it is not in `output_dir`.

    Attributes:
        topology: The topology of the current or last `train`; `None` before the first.
    """

    def __init__(
        self, algorithm: Algorithm, *, total_steps: int | None = None, resume_from: str | Path | None = None
    ) -> None:
        super().__init__(algorithm, total_steps=total_steps)
        self.resume_from = resume_from

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        **kwargs: Any,
    ) -> None:
        if state.global_step:
            self.load_state_dict(_load(_folder(args, state) if self.resume_from is None else Path(self.resume_from)))
        while hasattr(optimizer, "optimizer"):  # the wrapper of accelerate does not call hooks
            optimizer = optimizer.optimizer
        self.attach(model, optimizer, state.max_steps, _world(args))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        saved = self.state_dict()
        if state.is_world_process_zero:
            checkpoint.save(_folder(args, state) / FILE, saved)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and "loss" in logs:
            logs.update(self.metrics())
            state.log_history[-1].update(self.metrics())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint is not None and self.topology is not None:
            # The model has the best weights now.
            self.topology.load_state_dict(_load(Path(state.best_model_checkpoint))["topology"])
        self.detach()


_TrainerClass: Any = object  # the class that the mixin is combined with


class SparseTrainerMixin(_TrainerClass):
    """Adds sparse training to a `Trainer` class, before which it stands in the list of base classes.

        class SparseSeq2SeqTrainer(SparseTrainerMixin, Seq2SeqTrainer): ...

    `train` may resume from any folder, and every logger gets `density` and `exploration`.

    Args:
        topology: The topology, such as `eq.RigL(sparsity=0.9)`.
        *args: Arguments of the `Trainer`.
        **kwargs: Arguments of the `Trainer`.

    Attributes:
        sparse_training: The callback, with the attached topology.
    """

    def __init__(self, *args: Any, topology: Algorithm, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sparse_training = SparseTraining(topology)
        self.add_callback(self.sparse_training)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the `Trainer` does, and find the topology in the checkpoint to resume from."""
        folder = (
            get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        )
        self.sparse_training.resume_from = folder or None
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log density and exploration together with the loss."""
        super().log({**logs, **self.sparse_training.metrics()} if "loss" in logs else logs, *args, **kwargs)


class SparseTrainer(SparseTrainerMixin, Trainer):
    """A `Trainer` whose model is sparse from the first step to the last.

    trainer = SparseTrainer(model, args, train_dataset=data, topology=eq.RigL(sparsity=0.9))
    trainer.train()
    """


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    """The folder that the `Trainer` saves the present step in."""
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _load(folder: Path) -> dict[str, Any]:
    if not (folder / FILE).is_file():
        raise UserError(
            f"there is no {folder / FILE}, so the masks of the checkpoint are unknown; "
            "give its folder to SparseTraining(resume_from=FOLDER), or use SparseTrainer"
        )
    return checkpoint.load(folder / FILE)


def _world(args: TrainingArguments) -> World:
    """The processes of the training; callbacks get the model without its DistributedDataParallel wrapper."""
    if args.world_size == 1:
        return ALONE
    return World(dist.get_rank(), dist.get_world_size(), args.device)
