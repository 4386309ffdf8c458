"""Loader: reproducible epochs, in any order, from any batch, and the same batches in two steps."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_helpers import same
from equipoise.data import Augment, Images, Loader
from equipoise.data.loader import assemble
from equipoise.errors import UserError


def numbered(count: int, size: int = 6) -> Images:
    """Random images whose labels are their indices."""
    pixels = torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return Images(pixels, torch.arange(count))


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
    list(loader.epoch(epoch + 1))  # other requests in between change nothing
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


def test_without_augmentation_or_shuffling_images_are_unchanged_and_in_order():
    images = numbered(10)
    x, y = (torch.cat(parts) for parts in zip(*Loader(images, 4, shuffle=False).epoch(9), strict=True))
    assert torch.equal(y, images.labels)
    torch.testing.assert_close(x, images.images / 255, rtol=2**-23, atol=0)  # up to one rounding
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


def test_fixed_batches_are_permuted_and_augmented_differently_in_every_epoch():
    loader = Loader(numbered(40), 4, fixed_batches=True, augment=Augment(pad=2))
    orders = {tuple(loader.index(epoch, i) for i in range(10)) for epoch in range(5)}
    assert len(orders) == 5
    assert loader.batch(0, 0)[1].tolist() != list(range(4))
    again = next(i for i in range(10) if loader.index(1, i) == loader.index(0, 0))
    assert not torch.equal(loader.batch(0, 0)[0], loader.batch(1, again)[0])


def test_the_global_generator_is_not_used():
    before = torch.get_rng_state()
    list(Loader(numbered(20), 4, augment=Augment(pad=2)).epoch(0))
    assert torch.equal(before, torch.get_rng_state())


def test_changing_a_batch_does_not_change_the_images():
    images = numbered(8)
    before = images.images.clone()
    x, y = Loader(images, 8).batch(0, 0)
    x.zero_()
    y.zero_()
    assert torch.equal(images.images, before)
    assert images.labels.tolist() == list(range(8))


@settings(max_examples=20)
@given(st.sampled_from([-1, 4, 100, True, 1.0, None]))
def test_wrong_batch_indices_are_explained(i):
    loader = Loader(numbered(8), 2, fixed_batches=True)
    for ask in (loader.batch, loader.index, loader.place):
        with pytest.raises(UserError):
            ask(0, i)
    if i != 4:  # starting after the last batch gives an empty epoch
        with pytest.raises(UserError):
            loader.epoch(0, start=i)
    assert list(loader.epoch(0, start=4)) == []


@pytest.mark.parametrize("epoch", [-1, 1.0, True, None, "0"])
def test_wrong_epochs_are_explained(epoch):
    loader = Loader(numbered(8), 2)
    list(loader.epoch(1))  # True and 1.0 must be refused even if epoch 1 is cached
    with pytest.raises(UserError, match="epoch"):
        loader.epoch(epoch)


def test_wrong_options_are_explained():
    for batch in (0, -1, 2.0, True, "8"):
        with pytest.raises(UserError, match="batch="):
            Loader(numbered(8), batch)
    with pytest.raises(UserError, match="8 images do not fill one batch of 9"):
        Loader(numbered(8), 9, drop_last=True)
    with pytest.raises(UserError, match="fixed_batches=True"):
        Loader(numbered(8), 2).index(0, 0)
    with pytest.raises(UserError, match="reflect-padded"):
        Loader(numbered(8, size=4), 2, augment=Augment(pad=4))


# place and assemble


@given(counts, options, st.integers(1, 3), st.data())
def test_processes_share_every_batch(count, options, ranks, data):
    """Each process gets every `ranks`-th image of a batch, augmented as in a single process."""
    smallest = count % options["batch"] if count % options["batch"] and not options["drop_last"] else options["batch"]
    ranks = min(ranks, smallest)
    rank, epoch = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, 20))
    whole = Loader(numbered(count), **options).epoch(epoch)
    share = Loader(numbered(count), **options, rank=rank, ranks=ranks).epoch(epoch)
    assert same(share, [(x[rank::ranks], y[rank::ranks]) for x, y in whole])


@given(counts, options, st.sampled_from([(0, 1), (0, 2), (1, 2)]), st.data())
def test_a_placed_batch_is_bit_equal_to_the_returned_one(count, options, share, data):
    """For epochs in any order, ragged last batches, all augmentations, and calls of `batch` in between."""
    options["batch"] += 1  # two processes cannot share one image
    options["drop_last"] |= count % options["batch"] == 1
    rank, ranks = share
    loader = Loader(numbered(count), **options, rank=rank, ranks=ranks)
    expected = Loader(numbered(count), **options, rank=rank, ranks=ranks)
    positions = st.tuples(st.integers(0, 3), st.integers(0, len(loader) - 1))
    for epoch, i in data.draw(st.lists(positions, min_size=1, max_size=8)):
        size = loader.place(epoch, i)
        if data.draw(st.booleans()):
            loader.batch(*data.draw(positions))
        x, y = loader.assemble(size)
        assert same([(x, y)], [expected.batch(epoch, i)])
        assert len(y) == size
        assert x.is_contiguous()


def test_the_placed_position_stays_at_its_addresses():
    """A CUDA graph records addresses, so a new position must be written to the same tensors."""
    loader = Loader(numbered(10), 4, augment=Augment(pad=2))
    seen = []

    def recorded(images, labels, order, moves, start, size, reflect):
        seen.append([tensor.data_ptr() for tensor in (images, labels, order, *moves, start)])
        return assemble(images, labels, order, moves, start, size, reflect)

    for epoch, i in ((0, 0), (0, 2), (3, 1), (0, 1), (7, 0)):
        loader.assemble(loader.place(epoch, i), recorded)
    assert all(addresses == seen[0] for addresses in seen)


@pytest.mark.parametrize("augment", [None, Augment(pad=2), Augment(crop=False, shift=0.2)])
def test_assemble_compiles_to_one_graph_with_equal_results(augment):
    """One graph without breaks has no synchronisation with the host."""
    loader = Loader(numbered(10), 4, augment=augment)
    compiled = torch.compile(assemble, backend="eager", fullgraph=True)
    for epoch, i in ((0, 0), (0, 1), (2, 1)):
        size = loader.place(epoch, i)
        assert same([loader.assemble(size, compiled)], [loader.batch(epoch, i)])


def test_assembling_before_placing_is_explained():
    with pytest.raises(UserError, match="call place"):
        Loader(numbered(8), 2).assemble(2)


@pytest.mark.gpu
def test_the_gpu_gives_the_batches_of_the_cpu():
    images = numbered(500, size=32)
    for augment in (None, Augment(), Augment(mode="zero"), Augment(crop=False, shift=0.1)):
        there = Loader(images, 64, augment=augment, device="cuda")
        batches = list(there.epoch(3))
        assert all(x.is_cuda and y.is_cuda for x, y in batches)
        assert all(x.is_contiguous(memory_format=torch.channels_last) for x, _ in batches)
        assert same(Loader(images, 64, augment=augment).epoch(3), [(x.cpu(), y.cpu()) for x, y in batches])


@pytest.mark.gpu
def test_a_batch_on_the_gpu_does_not_synchronise():
    loader = Loader(numbered(500, size=32), 64, augment=Augment(mode="zero"), device="cuda")
    loader.batch(0, 0)  # draws the epoch, which is copied to the device once
    loader.batch(1, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in loader.epoch(0):
            pass
        for epoch, i in ((0, 1), (1, 7), (0, 0)):
            loader.assemble(loader.place(epoch, i))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_cuda_graph_replays_any_batch_of_any_epoch():
    loader = Loader(numbered(500, size=32), 64, augment=Augment(), device="cuda")
    compiled = torch.compile(assemble, dynamic=False)
    size = loader.place(0, 0)
    loader.assemble(size, compiled)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x, y = loader.assemble(size, compiled)
    for epoch, i in ((0, 3), (2, 0), (0, 6)):
        assert loader.place(epoch, i) == size
        graph.replay()
        assert same([(x, y)], [loader.batch(epoch, i)])
