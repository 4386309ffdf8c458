"""Studies as tasks of a Ray cluster."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.cli import main
from equipoise.cli.studies import resources
from equipoise.errors import UserError
from equipoise.studies.design import Design, read_study
from equipoise.studies.launch import Failure
from equipoise.studies.ray_launcher import on_ray
from equipoise.studies.runner import Job, jobs_of, run_study
from study_run_helpers import results_of, run, write_study
from train_helpers import tiny


class Lost(Exception):
    """What Ray raises when a machine is gone."""


class FakeRay(SimpleNamespace):
    """The functions of Ray that the launcher uses. A task runs when its result is requested, the last one first."""

    def __init__(self, gpus: float = 0, lost: str = "") -> None:
        super().__init__(asked=[], said=[], gpus=gpus, lost=lost, exceptions=SimpleNamespace(RayError=Lost))

    def init(self, **options: Any) -> None:
        self.said.append(options["address"])
        if options["address"] == "auto":
            raise ConnectionError("nobody there")

    def shutdown(self) -> None:
        self.said.append("shutdown")

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0, "GPU": self.gpus} if self.gpus else {"CPU": 4.0}

    def remote(self, function: Callable[..., Any]) -> SimpleNamespace:
        def options(**asked: Any) -> SimpleNamespace:
            self.asked.append(asked)
            return SimpleNamespace(remote=lambda *arguments: (function, arguments))

        return SimpleNamespace(options=options)

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return references[-1:], references[:-1]

    def get(self, reference: Any) -> Any:
        function, arguments = reference
        if arguments[-1] == self.lost:
            raise Lost("the machine is gone")
        return function(*arguments)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr("equipoise.studies.ray_launcher._ray", lambda: fake)
    return fake


def double(word: str, on_device: int) -> str:
    assert on_device == 1
    if word == "wrong":
        raise UserError("wrong word")
    return f"{word} {word} in {os.getcwd()}"


def test_each_job_is_a_task_and_failures_stay_with_their_job(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ray.lost = "lost"
    launcher = on_ray("there:6379", lambda job, gpus: {"num_cpus": len(job), "num_gpus": float(gpus)})
    monkeypatch.setattr("socket.create_connection", lambda *_: SimpleNamespace(close=lambda: None))
    outcomes = dict(launcher(double, ["a", "wrong", "lost"]))
    assert outcomes["a"] == f"a a in {tmp_path}"
    assert outcomes["wrong"] == Failure("wrong word")
    assert isinstance(outcomes["lost"], Failure)
    assert "run the study again" in outcomes["lost"].line
    assert ray.asked == [{"max_retries": 0, "num_cpus": n, "num_gpus": 0.0} for n in (1, 5, 4)]
    assert ray.said == ["there:6379", "shutdown"]


def test_a_cluster_that_does_not_answer_is_one_line(ray: FakeRay) -> None:
    with pytest.raises(UserError, match="no Ray cluster answers at auto: nobody there"):
        list(on_ray("auto", lambda job, gpus: {})(double, ["a"]))
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999"):
        with pytest.raises(UserError, match=f"no Ray cluster answers at {address}: "):
            list(on_ray(address, lambda job, gpus: {})(double, ["a"]))
    assert ray.said == ["auto"]


def test_without_ray_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"pip install 'equipoise\[ray\]'"):
        on_ray(None, lambda job, gpus: {})


@pytest.mark.parametrize(
    ("changes", "has_gpus", "asked"),
    [
        ({}, False, (1, 0.0)),
        ({}, True, (1, 1.0)),
        ({"device": "cpu"}, True, (1, 0.0)),
        ({"device": "cuda"}, False, (1, 1.0)),
        ({"data": {"name": "folder", "workers": 3}}, False, (4, 0.0)),
    ],
)
def test_a_job_requests_the_resources_of_its_recipe(changes: dict[str, Any], has_gpus: bool, asked: Any) -> None:
    job = Job(Design(name="s", title="S", arms={"a": {}}), "a", 0, tiny(**changes), Path("f"), Path("r"))
    assert tuple(resources(job, has_gpus).values()) == asked


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--address", "auto"], "use it with --launcher ray"), (["--launcher", "slurm"], "expected local or ray")],
)
def test_a_wrong_launcher_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["study", "digits", *words])
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_ray_gives_the_same_results(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    source = write_study(tmp_path)
    design = read_study(source)
    run(source, tmp_path / "here")
    jobs = jobs_of(design, tmp_path / "there/results", tmp_path / "there/runs")
    lines: list[str] = []
    assert run_study(design, jobs, tmp_path / "there/results", on_ray(None, resources), lines.append), lines
    assert results_of(tmp_path / "there") == results_of(tmp_path / "here")
