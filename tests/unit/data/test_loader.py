"""equipoise.data.loader and order: epochs that can be asked for again, in any order, from any batch."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.data import Augment, Images, Loader
from equipoise.errors import UserError


def numbered(count: int, size: int = 6) -> Images:
    """Random images whose labels are their numbers."""
    pixels = torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return Images(pixels, torch.arange(count))


def same(first, second) -> bool:
    """Whether two sequences of batches are bit-equal."""
    pairs = list(zip(first, second, strict=True))
    return all(torch.equal(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))


options = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 9),
        "seed": st.integers(0, 2**40),
        "shuffle": st.booleans(),
        "drop_last": st.booleans(),
        "fixed_batches": st.booleans(),
        "augment": st.sampled_from(
            [None, Augment(pad=2), Augment(pad=2, mode="zero"), Augment(crop=False, shift=0.2)]
        ),
    }
)
counts = st.integers(9, 40)  # at least one full batch


@given(counts, options, st.integers(0, 50))
def test_every_epoch_has_each_image_once(count, options, epoch):
    loader = Loader(numbered(count), **options)
    batches = list(loader.epoch(epoch))
    sizes = [len(y) for _, y in batches]
    labels = torch.cat([y for _, y in batches]).tolist()
    full, rest = divmod(count, options["batch"])
    expected = [options["batch"]] * full + [rest] * (rest > 0 and not options["drop_last"])
    assert len(batches) == len(loader) == len(expected)
    assert sorted(sizes) == sorted(expected)
    assert len(set(labels)) == len(labels) == sum(expected)
    assert set(labels) <= set(range(count))
    for x, y in batches:
        assert x.dtype == torch.float32
        assert x.shape == (len(y), 3, 6, 6)
        assert y.dtype == torch.int64


@given(counts, options, st.integers(0, 50), st.data())
def test_an_epoch_repeats_in_whole_in_part_and_by_batch(count, options, epoch, data):
    loader = Loader(numbered(count), **options)
    batches = list(loader.epoch(epoch))
    list(loader.epoch(epoch + 1))  # what else was asked for in between changes nothing
    assert same(batches, loader.epoch(epoch))
    assert same(batches, Loader(numbered(count), **options).epoch(epoch))
    start = data.draw(st.integers(0, len(loader)))
    assert same(batches[start:], loader.epoch(epoch, start=start))
    i = data.draw(st.integers(0, len(loader) - 1))
    list(itertools.chain(*(loader.epoch(other) for other in range(epoch + 2, epoch + 5))))
    assert same([batches[i]], [loader.batch(epoch, i)])


def test_interleaved_epochs_do_not_disturb_each_other():
    loader = Loader(numbered(30), batch=7, augment=Augment(pad=2))
    whole = [list(loader.epoch(k)) for k in range(4)]
    for i, batches in enumerate(zip(*(loader.epoch(k) for k in range(4)), strict=True)):
        assert same(batches, [each[i] for each in whole])


def test_epochs_and_seeds_differ():
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(torch.cat([y for _, y in Loader(numbered(40), 8, seed).epoch(epoch)]).tolist())

    assert len({order(seed, epoch) for seed in range(5) for epoch in range(5)}) == 25


def test_augmentation_belongs_to_the_image_not_to_the_batch():
    def seen(batch: int, shuffle: bool) -> torch.Tensor:
        loader = Loader(numbered(20), batch, seed=3, augment=Augment(pad=2), shuffle=shuffle)
        x, y = (torch.cat(parts) for parts in zip(*loader.epoch(4), strict=True))
        return x[y.argsort()]

    assert torch.equal(seen(3, True), seen(20, False))
    assert not torch.equal(seen(3, True), Loader(numbered(20), 20, shuffle=False).batch(4, 0)[0])


def test_without_augmentation_or_shuffling_the_images_come_as_they_are():
    images = numbered(10)
    x, y = (torch.cat(parts) for parts in zip(*Loader(images, 4, shuffle=False).epoch(9), strict=True))
    assert torch.equal(y, images.labels)
    torch.testing.assert_close(x, images.images / 255, rtol=2**-23, atol=0)  # to the last bit or so
    assert float(x.min()) >= 0
    assert float(x.max()) <= 1


@given(counts, st.integers(1, 9), st.booleans(), st.booleans())
def test_fixed_batches_keep_their_members(count, batch, shuffle, drop_last):
    loader = Loader(numbered(count), batch, shuffle=shuffle, drop_last=drop_last, fixed_batches=True)
    members: dict[int, list[int]] = {}
    for epoch in range(4):
        indices = [loader.index(epoch, i) for i in range(len(loader))]
        assert sorted(indices) == list(range(len(loader)))
        for i, (_, y) in enumerate(loader.epoch(epoch)):
            assert members.setdefault(indices[i], y.tolist()) == y.tolist()


def test_fixed_batches_change_places_and_are_mixed():
    loader = Loader(numbered(40), 4, fixed_batches=True, augment=Augment(pad=2))
    orders = {tuple(loader.index(epoch, i) for i in range(10)) for epoch in range(5)}
    assert len(orders) == 5
    assert loader.batch(0, 0)[1].tolist() != list(range(4))
    place = next(i for i in range(10) if loader.index(1, i) == loader.index(0, 0))
    assert not torch.equal(loader.batch(0, 0)[0], loader.batch(1, place)[0])  # augmented anew


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    list(Loader(numbered(20), 4, augment=Augment(pad=2)).epoch(0))
    assert torch.equal(before, torch.get_rng_state())


def test_images_are_not_changed_by_what_is_done_to_a_batch():
    images = numbered(8)
    before = images.images.clone()
    x, y = Loader(images, 8).batch(0, 0)
    x.zero_()
    y.zero_()
    assert torch.equal(images.images, before)
    assert images.labels.tolist() == list(range(8))


@settings(max_examples=20)
@given(st.sampled_from([-1, 4, 100, True, 1.0, None]))
def test_batches_that_are_not_there_are_explained(i):
    loader = Loader(numbered(8), 2, fixed_batches=True)
    for ask in (loader.batch, loader.index):
        with pytest.raises(UserError):
            ask(0, i)
    if i != 4:  # starting behind the last batch is an empty epoch, and fine
        with pytest.raises(UserError):
            loader.epoch(0, start=i)
    assert list(loader.epoch(0, start=4)) == []


@pytest.mark.parametrize("epoch", [-1, 1.0, True, None, "0"])
def test_epochs_that_are_none_are_explained(epoch):
    loader = Loader(numbered(8), 2)
    list(loader.epoch(1))  # a kept epoch 1 must not let True or 1.0 pass
    with pytest.raises(UserError, match="epoch"):
        loader.epoch(epoch)


def test_bad_options_are_explained():
    for batch in (0, -1, 2.0, True, "8"):
        with pytest.raises(UserError, match="batch="):
            Loader(numbered(8), batch)
    with pytest.raises(UserError, match="8 images do not fill one batch of 9"):
        Loader(numbered(8), 9, drop_last=True)
    with pytest.raises(UserError, match="fixed_batches=True"):
        Loader(numbered(8), 2).index(0, 0)
    with pytest.raises(UserError, match="reflect-padded"):
        Loader(numbered(8, size=4), 2, augment=Augment(pad=4)).epoch(0)


@pytest.mark.gpu
def test_the_gpu_sees_what_the_cpu_sees():
    images = numbered(500, size=32)
    for augment in (None, Augment(), Augment(mode="zero"), Augment(crop=False, shift=0.1)):
        there = Loader(images, 64, augment=augment, device="cuda")
        batches = list(there.epoch(3))
        assert all(x.is_cuda and y.is_cuda for x, y in batches)
        assert same(Loader(images, 64, augment=augment).epoch(3), [(x.cpu(), y.cpu()) for x, y in batches])


@pytest.mark.gpu
def test_a_batch_on_the_gpu_waits_for_nothing():
    loader = Loader(numbered(500, size=32), 64, augment=Augment(mode="zero"), device="cuda")
    loader.batch(0, 0)  # draws the epoch, which is copied to the device once
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in loader.epoch(0):
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
