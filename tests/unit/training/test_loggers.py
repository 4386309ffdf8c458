"""Metrics for other programs: CSV, TensorBoard, Weights & Biases."""

from __future__ import annotations

import csv
import json
import struct
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from equipoise.errors import UserError
from equipoise.training import RunFolder, Trainer, make_recipe, resume
from equipoise.training.loggers import CSV, TensorBoard, WeightsAndBiases, flatten
from train_helpers import tiny, trainer


def test_csv_has_a_row_per_epoch_also_of_a_resumed_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", tiny(epochs=2))
    Trainer(make_recipe(tiny(epochs=2)), folder, CSV(tmp_path / "m.csv")).run()
    resume(folder, make_recipe(tiny(epochs=3, correction="sgd")), CSV(tmp_path / "m.csv")).run()
    with open(tmp_path / "m.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = folder.metrics()
    assert [float(row["epoch"]) for row in rows] == [1, 2, 3]
    for row, line in zip(rows, lines, strict=True):
        assert float(row["scores/ema/accuracy"]) == line["scores"]["ema"]["accuracy"]
        assert float(row["train_loss"]) == line["train_loss"]


def test_tensorboard_gets_every_number_and_drops_repeated_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, float, int]] = []
    made_with: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            made_with.extend([folder, purge_step])

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            made_with.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    made = trainer(correction="agent")
    made.watcher = TensorBoard(tmp_path / "events")
    assert not made_with  # nothing is written before the run begins
    made.run()
    assert made_with == [str(tmp_path / "events"), 1, "closed"]
    last = {name: value for name, value, step in written if step == 2}
    assert last["scores/ema/accuracy"] == made.history[1]["scores"]["ema"]["accuracy"]
    assert last["correction/c"] == made.history[1]["correction"]["c"]
    assert last["exploration"] == made.history[1]["exploration"]


def test_without_tensorboard_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"pip install 'equipoise\[tensorboard\]'"):
        TensorBoard(tmp_path / "events")
    assert not (tmp_path / "events").exists()


def test_flattening_keeps_numbers_only() -> None:
    line = {"epoch": 1, "split": "test", "flag": True, "none": None, "scores": {"plain": {"loss": 0.5}}}
    assert flatten(line) == {"epoch": 1.0, "scores/plain/loss": 0.5}


@pytest.mark.slow
def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package, which writes to the folder of the run and reaches no network."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    path = tmp_path / "run"
    folder = RunFolder.create(path, tiny(epochs=1))
    Trainer(make_recipe(tiny(epochs=1)), folder, WeightsAndBiases(path)).run()
    resume(folder, make_recipe(tiny(epochs=2)), WeightsAndBiases(path)).run()
    number = (path / "wandb-id").read_text()
    files = sorted((path / "wandb").glob(f"offline-run-*-{number}/run-{number}.wandb"))
    logged = [row for file in files for row in wandb_history(file)]
    assert [row["epoch"] for row in logged] == [1, 2]
    for row, line in zip(logged, folder.metrics(), strict=True):
        assert row["scores/plain/accuracy"] == line["scores"]["plain"]["accuracy"]
        assert row["_step"] == line["epoch"]


def wandb_history(file: Path) -> list[dict[str, Any]]:
    """The rows in a file of an offline run."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
    return rows


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of a file in the format of LevelDB's log: blocks of 32 kB with parts of records."""
    whole, last, at, data = 1, 4, 7, b""
    while at + 7 <= len(content):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        data += content[at + 7 : at + 7 + length]
        if kind in (whole, last):
            yield data
            data = b""
        at += 7 + length


def test_without_wandb_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'equipoise\[wandb\]'"):
        WeightsAndBiases(tmp_path)
    assert not list(tmp_path.iterdir())
