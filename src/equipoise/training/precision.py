"""Floating-point precision of a run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """bf16 autocast if the recipe asks for it, or if it says `auto` and the device is a GPU."""
    if precision == "bf16" or (precision == "auto" and device.type == "cuda"):
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def packed_precision(precision: str) -> str:
    """Precision of the activations in a packed model, which runs on a CPU: `auto` is float32."""
    return "bf16" if precision == "bf16" else "float32"


def prepare_gpu(precision: str, device: torch.device) -> None:
    """Set the process to TF32, unless the precision is float32, and to convolutions chosen by measured speed."""
    if device.type != "cuda":
        return
    exact = precision == "float32"
    torch.set_float32_matmul_precision("highest" if exact else "high")
    torch.backends.cudnn.allow_tf32 = not exact
    torch.backends.cudnn.benchmark = True
