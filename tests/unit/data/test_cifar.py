"""CIFAR files and restricted pickles: official files are read, all others refused in one line."""

import os
import pickle
import struct
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import equipoise.data as data
from data_helpers import CIFAR10_BATCHES, cifar_rows, dump, write_cifar10, write_cifar100
from equipoise.data.plain_pickle import read_plain_pickle
from equipoise.errors import UserError


def python2_batch(data_rows: np.ndarray, labels: list[int]) -> bytes:
    """A batch as written by Python 2 and numpy 1, opcode by opcode: strings are `str`, align is the number 0."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    array = b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + number(0) + b"\x85"
    array += text(b"b") + b"\x87R("
    array += number(1) + number(data_rows.shape[0]) + number(data_rows.shape[1]) + b"\x86"
    array += b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R("
    array += number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array += b"\x89" + text(data_rows.tobytes()) + b"tb"
    listed = b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + listed + b"u."


def one_line(caught) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


def complaint(name: str, root) -> str | None:
    """The error message of `load`, or None."""
    try:
        data.load(name, root)
    except UserError as error:
        return str(error)
    return None


def test_cifar10_is_read_in_order(tmp_path):
    write_cifar10(tmp_path)
    splits = data.load("cifar10", tmp_path)
    assert splits.train.images.shape == (20, 3, 32, 32)
    assert splits.classes[3] == "class 3"
    assert splits.train.labels.tolist() == [(k + n) % 10 for k in range(5) for n in range(4)]
    assert splits.test.labels.tolist() == [5, 6, 7, 8]
    # Pixel by pixel, from the description of the format: 1024 red, 1024 green, 1024 blue, row by row.
    second_batch = cifar_rows(4, 1)
    for channel, y, x in [(0, 0, 0), (1, 5, 31), (2, 31, 7)]:
        assert splits.train.images[4 + 2, channel, y, x] == second_batch[2, 1024 * channel + 32 * y + x]
    held = data.load("cifar10", tmp_path, validation=5, seed=1)
    assert (len(held.train), len(held.validation), len(held.test)) == (15, 5, 4)


def test_cifar100_has_fine_labels(tmp_path):
    write_cifar100(tmp_path)
    splits = data.load("cifar100", tmp_path)
    assert splits.train.labels.tolist() == list(range(80, 100))
    assert len(splits.classes) == 100
    assert splits.test.images.shape == (20, 3, 32, 32)


def test_files_of_python_2_are_read_without_a_warning(tmp_path):
    folder = write_cifar10(tmp_path)
    pixels = cifar_rows(3, 9)
    (folder / "data_batch_1").write_bytes(python2_batch(pixels, [7, 8, 9]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        splits = data.load("cifar10", tmp_path)
    assert splits.train.labels[:3].tolist() == [7, 8, 9]
    np.testing.assert_array_equal(splits.train.images[:3].reshape(3, -1).numpy(), pixels)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_and_text_keys_are_read(tmp_path, protocol):
    folder = write_cifar10(tmp_path)
    dump(folder / "test_batch", {"data": cifar_rows(2, 0), "labels": [0, 1]}, protocol)
    if protocol >= 5:  # numpy then pickles through a buffer function, which the official files do not use
        with pytest.raises(UserError, match="_frombuffer"):
            data.load("cifar10", tmp_path)
    else:
        assert data.load("cifar10", tmp_path).test.labels.tolist() == [0, 1]


@pytest.mark.parametrize("name", [*CIFAR10_BATCHES, "test_batch", "batches.meta"])
def test_a_missing_file_is_named_with_its_folder_and_origin(tmp_path, name):
    folder = write_cifar10(tmp_path)
    (folder / name).unlink()
    with pytest.raises(UserError) as caught:
        data.load("cifar10", tmp_path)
    message = one_line(caught)
    assert f"no {name} in {folder}" in message
    assert "cs.toronto.edu/~kriz/cifar.html" in message


def test_a_missing_root_is_shown_as_an_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        data.load("cifar100")
    assert str(tmp_path / "data" / "cifar-100-python") in one_line(caught)


class Shell:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("name", ["data_batch_2", "batches.meta"])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, name, protocol):
    folder = write_cifar10(tmp_path)
    touched = tmp_path / "touched"
    dump(folder / name, {b"data": Shell(f"touch {touched}")}, protocol)
    with pytest.raises(UserError, match=r"posix\.system|nt\.system") as caught:
        data.load("cifar10", tmp_path)
    assert name in one_line(caught)
    assert not touched.exists()
    pickle.loads((folder / name).read_bytes())  # without the refusal the code would run
    assert touched.exists()


@pytest.mark.parametrize(
    "hostile",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"(S'true'\nios\nsystem\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x04load\x93\x8c\x01x\x85R.",
        b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.dumps\x93.",
        b"\x80\x02cnumpy\ndtype\nU\x01O\x85R.",
        b"\x80\x02\x82\x01.",
        b"Pname\n.",
        b"\x80\x05\x97.",
    ],
    ids=["global", "inst", "stack-global", "dotted", "object-dtype", "extension", "persistent", "buffer"],
)
def test_every_kind_of_reference_is_refused(tmp_path, hostile):
    path = tmp_path / "x"
    path.write_bytes(hostile)
    with pytest.raises((pickle.UnpicklingError, ValueError)):
        read_plain_pickle(path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("data_batch_3", {b"labels": [0, 1]}, 'under "data"'),
        ("data_batch_3", {b"data": cifar_rows(2, 0)}, 'under "labels"'),
        ("data_batch_3", {b"data": cifar_rows(2, 0)[:, :3000], b"labels": [0, 1]}, "rows of 3072"),
        ("data_batch_3", {b"data": cifar_rows(2, 0).astype(np.float32), b"labels": [0, 1]}, "uint8"),
        ("data_batch_3", {b"data": cifar_rows(2, 0).tolist(), b"labels": [0, 1]}, "uint8"),
        ("data_batch_3", {b"data": cifar_rows(2, 0), b"labels": [0, 1, 2]}, "2 images and 3 labels"),
        ("data_batch_3", {b"data": cifar_rows(2, 0), b"labels": [0, 10]}, r"labels 0\.\.10, not 0\.\.9"),
        ("data_batch_3", {b"data": cifar_rows(2, 0), b"labels": [-1, 0]}, r"labels -1\.\.0"),
        ("data_batch_3", {b"data": cifar_rows(2, 0), b"labels": [0, 10**30]}, "integers"),
        ("data_batch_3", {b"data": cifar_rows(2, 0), b"labels": [0, None]}, "integers"),
        ("data_batch_3", {b"data": cifar_rows(0, 0), b"labels": []}, "no images"),
        ("data_batch_3", [1, 2], "no dictionary"),
        ("batches.meta", {b"label_names": [b"a"]}, "10 names"),
        ("batches.meta", {}, "10 names"),
    ],
)
def test_wrong_content_is_explained(tmp_path, name, content, words):
    folder = write_cifar10(tmp_path)
    dump(folder / name, content, protocol=4)
    with pytest.raises(UserError, match=words) as caught:
        data.load("cifar10", tmp_path)
    message = one_line(caught)
    assert f"{name} in {folder}" in message
    assert "cs.toronto.edu" in message


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_damaged_file_gives_one_line_or_images(tmp_path, data_):
    """A truncated file is an error. A file with changed bytes may still be a dataset, but gives no traceback."""
    folder = write_cifar10(tmp_path, count=2)
    good = (folder / "test_batch").read_bytes()
    cut = data_.draw(st.booleans())
    if cut:
        bad = good[: data_.draw(st.integers(0, len(good) - 1))]
    else:
        head = data_.draw(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 255)), min_size=1, max_size=4))
        changed = bytearray(good)
        for index, value in head:
            changed[index if value % 2 else -1 - index] = value
        bad = bytes(changed)
    (folder / "test_batch").write_bytes(bad)
    message = complaint("cifar10", tmp_path)
    assert message is not None or not cut
    assert message is None or ("test_batch" in message and "\n" not in message)
