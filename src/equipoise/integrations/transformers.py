"""Hugging Face Transformers: sparse training as a callback, or as a `Trainer`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.correction.estimator import Estimator
from equipoise.errors import UserError
from equipoise.files import remove_leftovers
from equipoise.integrations.attachment import Attachment
from equipoise.topology import Algorithm
from equipoise.training import checkpoint
from equipoise.world import ALONE, World

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ModuleNotFoundError:
    raise ModuleNotFoundError("Transformers is not installed; pip install 'equipoise[transformers]'") from None

FILE = "equipoise.safetensors"  # in the folder of a checkpoint


class SparseTraining(Attachment, TrainerCallback):
    """Makes the model of a `Trainer` sparse from the first step of `train` to the last.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[SparseTraining(eq.RigL(sparsity=0.9))])
        trainer.train()

    All state is saved in the folder of each checkpoint, as `equipoise.safetensors`.
    `trainer.train(resume_from_checkpoint=True)` ends with the weights of an uninterrupted run. `density` and
    `exploration` are logged with the loss.

    A callback is not told the folder that training resumes from. It expects the one that this `Trainer` would write,
    `output_dir/checkpoint-STEP`. To resume from another folder, use `SparseTrainer` or give `resume_from`. A callback
    does not see the batches either: for a gradient correction use `SparseTrainer`.

    Args:
        algorithm: The topology, such as `eq.RigL(sparsity=0.9)`.
        correction: The gradient correction, such as `eq.Agent()`; only `SparseTrainer` can run one.
        total_steps: Number of optimizer steps of the whole training; by default taken from the `Trainer`.
        resume_from: Folder of the checkpoint that training resumes from, if it is not in `output_dir`.

    Attributes:
        topology: The topology of the current or last `train`; `None` before the first.
        correction: The attached correction; `None` if there is none.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        correction: Estimator | None = None,
        *,
        total_steps: int | None = None,
        resume_from: str | Path | None = None,
    ) -> None:
        super().__init__(algorithm, correction, total_steps=total_steps)
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
        while hasattr(optimizer, "optimizer"):  # hooks work on the optimizer inside the wrapper of accelerate
            optimizer = optimizer.optimizer
        self.attach(model, optimizer, state.max_steps, _world(args), args.gradient_accumulation_steps)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.correction is not None and not self.correction.steps:
            raise UserError(
                "a callback does not see the batches, which a correction needs; "
                "use SparseTrainer(..., topology=..., correction=...) instead of Trainer and SparseTraining"
            )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        saved = self.state_dict()
        if state.is_world_process_zero:
            file = _folder(args, state) / FILE
            remove_leftovers(file)  # of a process that was killed at the same step
            checkpoint.save(file, saved)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and "loss" in logs and "density" not in logs:
            numbers = self.metrics()
            logs.update(numbers)
            state.log_history[-1].update(numbers)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint is not None and self.topology is not None:
            # The model has the best weights now.
            self.topology.load_state_dict(_load(Path(state.best_model_checkpoint))["topology"])
        self.detach()


_TrainerClass: Any = object  # the class that the mixin is combined with


class SparseTrainerMixin(_TrainerClass):
    """Adds sparse training to a `Trainer` class that follows it in the list of base classes.

        class SparseSeq2SeqTrainer(SparseTrainerMixin, Seq2SeqTrainer): ...

    It does what the callback `SparseTraining` does. It also corrects gradients, resumes from any folder, and gives
    its numbers to every logger.

    A correction runs `compute_loss` also at old weights and, at the start of an epoch, on all batches.

    Args:
        *args: Arguments of the `Trainer`.
        topology: The topology, such as `eq.RigL(sparsity=0.9)`.
        correction: The gradient correction, such as `eq.Agent()`; by default none.
        **kwargs: Arguments of the `Trainer`.

    Attributes:
        sparse_training: The callback, with the attached topology and correction.
    """

    def __init__(self, *args: Any, topology: Algorithm, correction: Estimator | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if correction is not None and correction.mode == "previous" and self.args.gradient_accumulation_steps > 1:
            raise UserError("MVR needs the whole batch of a step at once; use gradient_accumulation_steps=1")
        self.sparse_training = SparseTraining(topology, correction)
        self.add_callback(self.sparse_training)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the `Trainer` does, and find the state in the checkpoint to resume from."""
        last = get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        self.sparse_training.resume_from = last or None
        self._refresh_batches = _Batches(self)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run the step of the `Trainer`, and correct its gradient."""
        correction = self.sparse_training.correction
        if correction is None:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        self.sparse_training.before_batch(int(self.state.epoch or 0), self._refresh_batches, self._step_loss)
        loss = super().training_step(model, inputs, num_items_in_batch)
        scaler = self.accelerator.scaler
        batch = inputs, num_items_in_batch, self.current_gradient_accumulation_steps
        correction.correct(self._step_loss, *batch, scale=1.0 if scaler is None else scaler.get_scale(), loss=loss)
        return loss

    def _step_loss(
        self, model: nn.Module, inputs: dict[str, Any], items: Tensor | int | None, accumulated: int
    ) -> Tensor:
        """Compute the loss that `training_step` differentiates: its share of the loss of the accumulated batches."""
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=items)
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            scaled = (self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None
        return loss if scaled else loss / accumulated

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the numbers of the sparse training together with the loss."""
        super().log({**logs, **self.sparse_training.metrics()} if "loss" in logs else logs, *args, **kwargs)


class SparseTrainer(SparseTrainerMixin, Trainer):
    """A `Trainer` whose model is sparse from the first step to the last; see `SparseTrainerMixin`.

    trainer = SparseTrainer(model, args, train_dataset=data, topology=eq.RigL(sparsity=0.9), correction=eq.Agent())
    trainer.train()
    """


class _Batches:
    """The batches of the current epoch as `training_step` gets them."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loader: Any = None  # the loader of the trainer is in use

    def __len__(self) -> int:
        return len(self._trainer.callback_handler.train_dataloader)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor | int | None, int]]:
        trainer, args = self._trainer, self._trainer.args
        if self._loader is None:
            self._loader = trainer.get_train_dataloader()
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(int(trainer.state.epoch or 0))
        batches = iter(self._loader)
        while True:
            group, items = trainer.get_batch_samples(batches, args.gradient_accumulation_steps, args.device)
            if not group:
                return
            for inputs in group:
                yield inputs, items, len(group)


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
