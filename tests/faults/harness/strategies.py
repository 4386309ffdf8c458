"""Hypothesis strategies: recipes, overrides and command lines that nobody would write."""

from __future__ import annotations

import string
from typing import Any

from hypothesis import strategies as st

from equipoise.config import parameters_of
from equipoise.training.recipe import CATALOGUES, DEFAULT_NAMES, KEYS, DataOptions

numbers = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 0.0, 0.5, 1.0, 1.5, -0.5, 1e-300, 1e300, 2**31, 2**62, 2**63, 10**30, 10**400]),
    st.integers(-5, 5),
    st.floats(),
)
words = st.one_of(
    st.sampled_from(["", "nan", "1e-3", "1e999", "true", "name", "x" * 3000, "ü", "[/b]", "\x1b[31m", "a\nb", "0"]),
    st.sampled_from([name for catalogue in CATALOGUES.values() for name in catalogue]),
    st.sampled_from(["erk", "er", "uniform", "bsr", "cosine", "linear", "replay", "running", "pays", "rigl-itop"]),
    st.text(string.printable, max_size=6),
)
scalars = st.none() | st.booleans() | numbers | words
junk = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | st.integers(), inner, max_size=3),
    max_leaves=6,
)

OPTIONS: dict[str, list[str]] = {
    **{part: sorted({o for entry in c.values() for o in parameters_of(entry)}) for part, c in CATALOGUES.items()},
    "data": sorted(parameters_of(DataOptions)),
    "checkpoint": ["every", "steps", "keep"],
}
NAMES: dict[str, list[str]] = {part: list(c) for part, c in CATALOGUES.items()}
PLAIN = [key for key in KEYS if key not in DEFAULT_NAMES]
DANGEROUS = {"hidden", "width"}  # a large value makes a network that fills the memory


def safe(option: str, value: Any) -> Any:
    return 7 if option in DANGEROUS and isinstance(value, int | float | str) else value


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """Right and wrong values for known and unknown keys."""
    found: list[tuple[str, Any]] = []
    for _ in range(draw(st.integers(1, 3))):
        part = draw(st.sampled_from([*OPTIONS, *PLAIN, "nothing", ""]))
        kind = draw(st.integers(0, 3))
        if kind == 0 or part not in OPTIONS:
            found.append((part, draw(junk)))
        elif kind == 1 and part in NAMES:
            found.append((part, draw(st.sampled_from(NAMES[part]))))
        else:
            option = draw(st.sampled_from([*OPTIONS[part], "name", "nothing"]))
            found.append((f"{part}.{option}", safe(option, draw(scalars if kind == 2 else junk))))
    return found


def changed(raw: dict[str, Any], chosen: list[tuple[str, Any]]) -> dict[str, Any]:
    """Apply `changes` to a recipe."""
    result = dict(raw)
    for key, value in chosen:
        part, dot, option = key.partition(".")
        if not dot:
            result[part] = value
            continue
        old = result.get(part, DEFAULT_NAMES.get(part, {}))
        old = {"name": old} if isinstance(old, str) else old
        result[part] = {**(old if isinstance(old, dict) else {}), option: value}
    return result


overrides = st.one_of(
    st.builds("{}={}".format, st.sampled_from(KEYS), words),
    st.builds(
        "{}.{}={}".format,
        st.sampled_from(sorted(OPTIONS)),
        st.sampled_from(sorted({o for options in OPTIONS.values() for o in options} - DANGEROUS)),
        scalars,
    ),
    st.text(string.printable, max_size=12),
)

command_words = st.one_of(
    st.sampled_from(["digits", "agent", "run", "tiny.yaml", "nowhere", ".", "..", "", "-", "--", "runs", "models"]),
    st.sampled_from(
        ["--out", "--epochs", "--tensorboard", "--help", "--best", "--split", "test", "train", "--attack"]
    ),
    st.sampled_from(["--eps", "--images", "pgd20", "1", "-1", "0.1", "--nothing", "-x"]),
    st.sampled_from(["--format", "onnx", "state_dict", "--values", "int8", "--force", "out.bin", "--weights"]),
    st.sampled_from(["--against", "best", "--noise", "--batches", "--json", "-o", "out.html", "--list", "--seeds"]),
    overrides,
).filter(lambda word: "\0" not in word)
commands = st.tuples(
    st.sampled_from(
        ["train", "resume", "eval", "list", "show", "demo", "export", "measure", "report", "study", "", "nothing"]
    ),
    st.lists(command_words, max_size=5),
).map(lambda pair: [pair[0], *pair[1]])
