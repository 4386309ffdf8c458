"""Write a dense model to an ONNX file with torch's exporter."""

from __future__ import annotations

import importlib.util
import io
import logging
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from torch import nn

from equipoise.errors import UserError

NEEDED = ("onnx", "onnxscript")


def missing() -> list[str]:
    """Return the packages that the exporter needs and that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def check_installed() -> None:
    """Raise a `UserError` if a package is missing."""
    if missing():
        raise UserError(f"ONNX needs {' and '.join(missing())}: pip install equipoise[onnx]")


def write_model(model: nn.Module, input_shape: tuple[int, ...], path: Path) -> None:
    """Write one ONNX file, weights included, with the input `images` (any number) and the output `logits`."""
    check_installed()
    images = torch.zeros(2, *input_shape)  # with a single image the exporter would fix the number
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    quiet = io.StringIO()
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), redirect_stdout(quiet), redirect_stderr(quiet):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                model,
                (images,),
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
                dynamo=True,
                verbose=False,
            )
            assert program is not None
            program.save(str(path), external_data=False)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
