"""The kinds of files that equipoise reads, and files that would run code in a careless reader."""

from __future__ import annotations

import contextlib
import io
import json
import os
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import torch
import yaml

import equipoise
from data_helpers import svhn_content, write_cifar10, write_cifar100
from deploy_helpers import random_network
from equipoise import cli
from equipoise.deploy.export import export
from equipoise.errors import UserError
from equipoise.kernels import library
from harness.commands import GUARD, in_time, run_command
from harness.damage import Kind
from harness.signed import sign_checkpoint, sign_packed
from study_helpers import write_study
from train_helpers import tiny

library.available()  # may call a compiler, which the guard would report

SUFFIXES = ("png", "jpeg", "gif", "bmp", "tiff", "ppm", "webp")


def _write_recipe(work: Path, **changes: object) -> None:
    (work / "recipe.yaml").write_text(yaml.safe_dump(tiny(**changes)))


def write_run(work: Path) -> None:
    """Write a finished run with two checkpoints and the best."""
    _write_recipe(work, epochs=2, correction="agent")
    with contextlib.chdir(work), contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        cli.main(["train", "recipe.yaml", "--out", "run"])
    assert (work / "run" / "result.json").exists()


def _in(folder: str, *patterns: str) -> partial[list[Path]]:
    return partial(_found, folder, patterns)


def _found(folder: str, patterns: tuple[str, ...], work: Path) -> list[Path]:
    return sorted(path for pattern in patterns for path in (work / folder).glob(pattern) if path.is_file())


def _read_recipe(work: Path, random: Random) -> None:
    run_command(["train", "recipe.yaml", "--out", "run"], work)


def _read_study(work: Path, random: Random) -> None:
    run_command(["study", "study.yaml", "--results", "r", "--work", "w", "--list"], work)


def _write_study_file(work: Path) -> None:
    _write_recipe(work)
    arms = {"SGD": {}, "AGENT": {"correction": "agent", "topology.sparsity": 0.9}}
    claims = [{"says": "better", "better": "AGENT", "than": "SGD", "at": 2}]
    study = {"title": "T", "recipe": "recipe.yaml", "seeds": [0, 1], "arms": arms, "claims": claims}
    (work / "study.yaml").write_text(yaml.safe_dump(study))


def _read_checkpoint(work: Path, random: Random) -> None:
    words = random.choice([["eval", "run"], ["eval", "run", "--best"], ["resume", "run"], ["export", "run", "out"]])
    run_command(words, work)


def _read_run(work: Path, random: Random) -> None:
    words = random.choice([["show", "run"], ["eval", "run"], ["resume", "run"], ["report", "run", "-o", "out.html"]])
    run_command(words, work)


def _write_packed(work: Path) -> None:
    for i, values in enumerate(("float32", "bf16", "int8")):
        network, _ = random_network("small", seed=i)
        export(network, work / f"{values}.safetensors", values=values)


def _read_packed(work: Path, random: Random) -> None:
    _load_and_run(work)


def _load_and_run(work: Path, into: torch.nn.Module | None = None) -> None:
    """Load and run the files in this process."""
    for path in sorted(work.glob("*.safetensors")):
        with GUARD.within(work) as outside, in_time():
            try:
                equipoise.load(path, into=into)(torch.zeros(1, 1, 8, 8))
            except UserError as error:
                assert "\n" not in str(error)  # noqa: PT017
        assert not outside, outside


UNFINISHED: dict[str, dict[str, object]] = {
    "masked": {
        "topology": {"name": "rigl", "sparsity": 0.8, "every": 2},
        "correction": "agent",
        "optimizer": {"name": "adam", "lr": 0.005},
    },
    "packed": {
        "topology": {"name": "snfs", "sparsity": 0.8, "every": 2},
        "correction": "saga",
        "storage": "packed",
    },
    "convolutional": {
        "model": "small",
        "topology": {"name": "set", "sparsity": 0.8, "every": 1},
        "data": {"name": "digits", "batch": 60, "validation": 1257},
        "correction": "svrg",
        "storage": "packed",
    },
}


def _write_unfinished(name: str, work: Path) -> None:
    """Write a run whose last steps are missing."""
    _write_recipe(work, epochs=1, checkpoint={"steps": 2}, **UNFINISHED[name])
    with contextlib.chdir(work), contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        cli.main(["train", "recipe.yaml", "--out", "run"])
    (work / "run" / "result.json").unlink()
    max((work / "run" / "checkpoints").glob("step-*")).unlink()


def _read_unfinished(work: Path, random: Random) -> None:
    words = random.choice([["resume"], ["resume"], ["eval"], ["eval", "--best"], ["export", "out"], ["measure"]])
    run_command([words[0], "run", *words[1:]], work)


def _custom_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 10),
    )  # fmt: skip


def _write_custom(work: Path) -> None:
    model = equipoise.sparse.pack(_custom_model(), equipoise.RigL(sparsity=0.9))
    for values in ("float32", "bf16", "int8"):
        equipoise.save(model, work / f"{values}.safetensors", values=values)


def _read_custom(work: Path, random: Random) -> None:
    _load_and_run(work, into=_custom_model())


def _data_recipe(work: Path, name: str, **options: object) -> None:
    data = {"name": name, "root": "data", "batch": 4, "test_batch": 4, "workers": 0, **options}
    _write_recipe(work, data=data, topology="dense", epochs=1, model={"name": "mlp", "hidden": 4})


def _write_cifar(work: Path) -> None:
    write_cifar10(work / "data", count=2)
    write_cifar100(work / "data", count=4)
    _data_recipe(work, "cifar10")


def _read_cifar(work: Path, random: Random) -> None:
    for name in ("cifar10", "cifar100"):
        run_command(["train", "recipe.yaml", f"data.name={name}", "--out", name], work)


def _write_svhn(work: Path) -> None:
    from scipy.io import savemat

    (work / "data").mkdir()
    for split, compressed in (("train", True), ("test", False)):
        savemat(work / "data" / f"{split}_32x32.mat", svhn_content(4, 0), do_compression=compressed)
    _data_recipe(work, "svhn")


def _read_data(work: Path, random: Random) -> None:
    run_command(["train", "recipe.yaml", "--out", "run"], work)


def _write_pictures(work: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for part, name in (("train", "a"), ("train", "b"), ("val", "a")):
        folder = work / "data" / part / name
        folder.mkdir(parents=True)
        for suffix in SUFFIXES:
            Image.fromarray(rng.integers(0, 256, (9, 8, 3), dtype=np.uint8)).save(folder / f"x.{suffix}")
    _data_recipe(work, "folder", size=8)


def _write_results(work: Path) -> None:
    write_study(work / "results" / "s")
    write_run(work)


def _read_results(work: Path, random: Random) -> None:
    words = random.choice(
        [
            ["report", "results", "-o", "out.html"],
            ["report", "results/s", "-o", "out.html"],
            ["study", "--reproduction", "out.md", "--results", "results"],
        ]
    )
    run_command(words, work)


FILES = [
    Kind("recipes", _write_recipe, _in(".", "recipe.yaml"), _read_recipe),
    Kind("study files", _write_study_file, _in(".", "*.yaml"), _read_study),
    Kind("checkpoints", write_run, _in("run/checkpoints", "*"), _read_checkpoint, commands=4),
    Kind("other files of a run", write_run, _in("run", "*.yaml", "*.json", "*.jsonl"), _read_run, commands=4),
    Kind("packed files", _write_packed, _in(".", "*.safetensors"), _read_packed),
    Kind("CIFAR pickles", _write_cifar, _in("data", "*/*"), _read_cifar),
    Kind("SVHN .mat files", _write_svhn, _in("data", "*.mat"), _read_data),
    Kind("image files", _write_pictures, _in("data", "train/*/*"), _read_data),
    Kind("results files", _write_results, _in("results", "*/*.json"), _read_results, commands=3),
    *(
        Kind(
            f"checkpoints of {name} runs, signed",
            partial(_write_unfinished, name),
            _in("run/checkpoints", "*"),
            _read_unfinished,
            commands=5,
            change=sign_checkpoint,
            trains=True,
        )
        for name in UNFINISHED
    ),
    Kind("packed files, signed", _write_packed, _in(".", "*.safetensors"), _read_packed, change=sign_packed),
    Kind("custom files, signed", _write_custom, _in(".", "*.safetensors"), _read_custom, change=sign_packed),
]


# Files that would run code


def _yaml_code(target: Path) -> bytes:
    call = f'!!python/object/apply:os.system ["touch {target}"]'
    return f"epochs: {call}\ntitle: {call}\n".encode()


class _Malicious:
    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.target,)


def payloads(target: Path) -> dict[str, bytes]:
    """Return bytes that make a careless reader create `target`, by name."""
    import pickle
    import zipfile

    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:  # as torch.save writes it
        file.writestr("archive/data.pkl", pickle.dumps(_Malicious(target), protocol=2))
        file.writestr("archive/version", "3\n")
    array = np.empty(1, dtype=object)
    array[0] = _Malicious(target)
    numpy_file = io.BytesIO()
    np.save(numpy_file, array, allow_pickle=True)
    return {
        "pickle": pickle.dumps(_Malicious(target), protocol=2),
        "pickle in a dictionary": pickle.dumps({b"data": _Malicious(target), b"labels": [0]}, protocol=2),
        "pickle of an array of objects": pickle.dumps({b"data": array, b"labels": [0]}, protocol=2),
        "torch.save": archive.getvalue(),
        "numpy.save": numpy_file.getvalue(),
        "yaml": _yaml_code(target),
        "json": json.dumps({"__reduce__": ["os.mkdir", [str(target)]], "py/object": "os.mkdir"}).encode(),
    }
