"""Accuracy of packed training in float32 and in bf16, over the same seeds.

    python bench/precision.py [--recipes digits digits-set-itop] [--seeds 5] [--set epochs=3 topology.sparsity=0.99 ...]

Each line is a recipe and a precision: the mean test accuracy over the seeds, its standard deviation and all runs.
Below the lines of a recipe: the mean of the differences between runs of the same seed, and its standard error.
"""

from __future__ import annotations

import argparse
import statistics

from equipoise.training import Trainer, apply_overrides, make_recipe, read_recipe

PRECISIONS = ("float32", "bf16")


def accuracy(name: str, precision: str, seed: int, overrides: list[str]) -> float:
    """Test accuracy of a packed run in percent, with the weights as they are (`plain`)."""
    fixed = ["storage=packed", f"precision={precision}", f"seed={seed}", "device=cpu"]
    result = Trainer(make_recipe(apply_overrides(read_recipe(name), [*overrides, *fixed]))).run()
    return 100 * float(result["test"]["plain"]["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["digits", "digits-set-itop"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=[], help="changes of the recipes, as in `equipoise train --set`")
    arguments = parser.parse_args()
    for name in arguments.recipes:
        runs: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
        for seed in range(arguments.seeds):
            for precision in PRECISIONS:
                runs[precision].append(accuracy(name, precision, seed, arguments.set))
        for precision, found in runs.items():
            spread = statistics.stdev(found) if len(found) > 1 else 0.0
            print(f"{name}, {precision}: {statistics.mean(found):.2f} ± {spread:.2f} %", [round(a, 2) for a in found])
        differences = [half - single for single, half in zip(runs["float32"], runs["bf16"], strict=True)]
        error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
        print(f"{name}, bf16 - float32: {statistics.mean(differences):+.2f} ± {error:.2f} points", flush=True)


if __name__ == "__main__":
    main()
