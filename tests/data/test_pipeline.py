import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.graph_errors import as_user_error
from tfdist.data.pipeline import (
    make_eval_dataset,
    make_train_dataset,
    make_train_reader,
    steps_per_epoch,
)
from tfdist.data.rows import split_batches, split_rows
from tfdist.data.source import ArraySource, BatchSource, Source
from tfdist.errors import TfdistError
from tfdist.tasks.segmentation.augment import Augmentation
from tfdist.tasks.segmentation.shapes import make_shapes

AUGMENTATION = Augmentation(flip=True, scale=(0.6, 1.7), color=0.3, ignore_label=9)


def make_counting_source(num_examples):
    return ArraySource.from_arrays({"i": np.arange(num_examples), "x": np.zeros((num_examples, 2))})


def take_global_batches(dataset, num_steps, num_local):
    """Returns the elements of `num_steps` steps, each step's replicas concatenated."""
    elements = list(dataset.take(num_steps * num_local).as_numpy_iterator())
    return [
        tf.nest.map_structure(
            lambda *parts: np.concatenate(parts), *elements[k * num_local : (k + 1) * num_local]
        )
        for k in range(num_steps)
    ]


def assert_same(left, right):
    tf.nest.assert_same_structure(left, right)
    for a, b in zip(tf.nest.flatten(left), tf.nest.flatten(right), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def shapes():
    return make_shapes("train", (24, 32), 20)


@pytest.fixture(scope="module")
def one_replica(shapes):
    dataset = make_train_dataset(shapes, global_batch_size=8, seed=3, augmentation=AUGMENTATION)
    return take_global_batches(dataset, 6, 1)


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 8])
def test_global_batch_does_not_depend_on_the_number_of_replicas(shapes, one_replica, num_replicas):
    dataset = make_train_dataset(
        shapes, global_batch_size=8, seed=3, num_replicas=num_replicas, augmentation=AUGMENTATION
    )
    assert_same(take_global_batches(dataset, 6, num_replicas), one_replica)


def test_processes_together_make_the_global_batch(shapes, one_replica):
    parts = [
        take_global_batches(
            make_train_dataset(
                shapes,
                global_batch_size=8,
                seed=3,
                num_replicas=3,
                replicas=replicas,
                augmentation=AUGMENTATION,
            ),
            6,
            len(replicas),
        )
        for replicas in (range(2), range(2, 3))
    ]
    joined = [
        tf.nest.map_structure(lambda a, b: np.concatenate([a, b]), *pair)
        for pair in zip(*parts, strict=True)
    ]
    assert_same(joined, one_replica)


@pytest.mark.parametrize("start_step", [1, 4])
def test_start_step_continues_the_stream(shapes, one_replica, start_step):
    dataset = make_train_dataset(
        shapes,
        global_batch_size=8,
        seed=3,
        start_step=start_step,
        num_replicas=2,
        augmentation=AUGMENTATION,
    )
    assert_same(take_global_batches(dataset, 6 - start_step, 2), one_replica[start_step:])


def test_seed_changes_the_stream(shapes, one_replica):
    dataset = make_train_dataset(shapes, global_batch_size=8, seed=4, augmentation=AUGMENTATION)
    assert not np.array_equal(take_global_batches(dataset, 1, 1)[0][0], one_replica[0][0])


def test_augmentation_changes_from_pass_to_pass():
    source = make_shapes("train", (24, 32), 1)
    dataset = make_train_dataset(source, global_batch_size=4, seed=3, augmentation=AUGMENTATION)
    images = take_global_batches(dataset, 1, 1)[0][0]
    assert len({image.tobytes() for image in images}) == 4


@pytest.mark.parametrize("num_examples", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("seed", [0, 2**31 - 1])
def test_every_pass_holds_every_example_once(num_examples, seed):
    dataset = make_train_dataset(
        make_counting_source(num_examples), global_batch_size=6, seed=seed, num_replicas=4
    )
    steps = steps_per_epoch(4 * num_examples, 6)
    batches = take_global_batches(dataset, steps, 4)
    stream = np.concatenate([batch["i"] for batch in batches])[: 4 * num_examples]
    passes = stream.reshape(4, num_examples)
    np.testing.assert_array_equal(np.sort(passes, axis=1), [np.arange(num_examples)] * 4)
    if num_examples == 50:
        assert len({tuple(row) for row in passes}) == 4


def test_order_is_that_of_index_shuffle():
    """Holds the vectorised shuffle to the public function, one position at a time."""
    num_examples, seed = 11, 5
    dataset = make_train_dataset(make_counting_source(num_examples), global_batch_size=8, seed=seed)
    stream = np.concatenate([b["i"] for b in take_global_batches(dataset, 5, 1)])
    expected = [
        int(
            tf.random.experimental.index_shuffle(
                tf.constant(p % num_examples, tf.int64),
                tf.constant([seed, p // num_examples], tf.int64),
                tf.constant(num_examples - 1, tf.int64),
            )
        )
        for p in range(40)
    ]
    assert stream.tolist() == expected


def test_without_shuffle_passes_are_in_order():
    dataset = make_train_dataset(
        make_counting_source(5), global_batch_size=4, seed=0, shuffle=False
    )
    stream = np.concatenate([b["i"] for b in take_global_batches(dataset, 3, 1)])
    assert stream.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_far_step_of_a_large_source_starts_at_once():
    source = make_shapes("train", (32, 32), 1_000_000)
    # To read its way there would take for ever.
    dataset = make_train_dataset(source, global_batch_size=16, seed=1, start_step=10**12)
    image, _ = next(iter(dataset))
    assert image.shape == (16, 32, 32, 3)


@pytest.mark.parametrize(
    ("num_examples", "step"), [(3_000_000_000, 10**9), (2**31 + 1, 2**40), (7, 2**50)]
)
def test_positions_need_more_than_32_bits(num_examples, step):
    class Positions(BatchSource):
        @property
        def element_spec(self):
            return tf.TensorSpec((), tf.int64)

        def load_batch(self, indices):
            return indices

    source, batch = Positions(num_examples=num_examples), min(64, num_examples)
    read = make_train_reader(source, global_batch_size=batch, seed=3)
    found = read(tf.constant(step, tf.int64)).numpy()
    assert found.min() >= 0
    assert found.max() < num_examples
    assert len(set(found.tolist())) == batch
    dataset = make_train_dataset(source, global_batch_size=batch, seed=3, start_step=step)
    np.testing.assert_array_equal(next(iter(dataset)), found)
    read = make_train_reader(source, global_batch_size=batch, seed=3, shuffle=False)
    expected = [position % num_examples for position in range(step * batch, (step + 1) * batch)]
    assert read(tf.constant(step, tf.int64)).numpy().tolist() == expected


def test_stream_has_no_end_and_static_shapes_where_they_divide(shapes):
    dataset = make_train_dataset(shapes, global_batch_size=8, seed=0, num_replicas=2)
    assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    assert dataset.element_spec[0].shape == (4, 24, 32, 3)
    assert dataset.element_spec[0].dtype == tf.float32
    assert dataset.element_spec[1] == tf.TensorSpec((4, 24, 32), tf.int32)
    uneven = make_train_dataset(shapes, global_batch_size=8, seed=0, num_replicas=3)
    assert uneven.element_spec[0].shape.as_list() == [None, 24, 32, 3]


def test_split_rows_is_even_and_larger_first():
    assert split_rows(16, 3) == [(0, 6), (6, 11), (11, 16)]
    assert split_rows(2, 3) == [(0, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize(("num_examples", "batch"), [(10, 4), (9, 4), (8, 4), (1, 4), (5, 16)])
def test_eval_covers_every_example_once(num_examples, batch, num_replicas):
    source = make_counting_source(num_examples)
    dataset = make_eval_dataset(source, global_batch_size=batch, num_replicas=num_replicas)
    elements = list(dataset.as_numpy_iterator())
    assert len(elements) == steps_per_epoch(num_examples, batch) * num_replicas
    if num_examples % batch == 0 and batch % num_replicas == 0:
        assert dataset.element_spec[0]["i"].shape == (batch // num_replicas,)
    seen: list[int] = []
    for place, (part, (first, total)) in enumerate(elements):
        is_copy = total < num_replicas
        assert (first == 0 and len(part["i"]) == total) if is_copy else len(part["i"]) >= 1
        if not is_copy or place % num_replicas == 0:
            seen += part["i"].tolist()
    assert seen == list(range(num_examples))


def test_eval_gives_every_process_equally_many():
    source = make_counting_source(5)
    parts = [
        list(
            make_eval_dataset(
                source, global_batch_size=4, num_replicas=3, replicas=[replica]
            ).as_numpy_iterator()
        )
        for replica in range(3)
    ]
    assert [len(part) for part in parts] == [2, 2, 2]
    # The last batch has one row, which every replica gets.
    assert [part[1][1].tolist() for part in parts] == [[0, 1]] * 3
    assert [part[0][1].tolist() for part in parts] == [[0, 4], [2, 4], [3, 4]]


@pytest.mark.parametrize("known", [True, False])
def test_refuses_a_batch_whose_parts_have_different_numbers_of_rows(known):
    many, few = (tf.data.Dataset.range(12).batch(n, drop_remainder=known) for n in (6, 4))
    both = tf.data.Dataset.zip(many, few)
    with pytest.raises((TfdistError, tf.errors.InvalidArgumentError)) as error:
        list(split_batches(both, num_replicas=2))
    message = str(as_user_error(error.value))
    sizes = "4 and 6" if known else "6 and 4"
    assert message.startswith("Cannot divide a batch over replicas: its parts have different")
    assert f"numbers of examples ({sizes}). Give" in message
    assert list(split_batches(tf.data.Dataset.zip(few, few), num_replicas=2))


def test_load_alone_is_enough_for_a_source():
    class Squares(Source):
        @property
        def element_spec(self):
            return tf.TensorSpec((), tf.int64)

        def load(self, index):
            return index * index

    dataset = make_train_dataset(
        Squares(num_examples=4), global_batch_size=4, seed=0, shuffle=False
    )
    assert next(iter(dataset)).numpy().tolist() == [0, 1, 4, 9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_batch_size": 2, "num_replicas": 3}, "global batch of 2 over 3 .* at least 3"),
        ({"seed": -1}, "seed -1: it must be in 0"),
        ({"seed": 2**31}, "it must be in 0"),
        ({"start_step": -1}, "start at step -1"),
        ({"num_replicas": 2, "replicas": [2]}, "replicas 2 of 2"),
        ({"replicas": []}, "replicas none of 1"),
        ({"augmentation": AUGMENTATION}, r"must be \(image, mask\), found dict of 2"),
    ],
)
def test_train_refuses(arguments, message):
    with pytest.raises(TfdistError, match=message):
        make_train_dataset(
            make_counting_source(4), **({"global_batch_size": 4, "seed": 0} | arguments)
        )


def test_eval_refuses_an_empty_batch():
    with pytest.raises(TfdistError, match="global batch of 0"):
        make_eval_dataset(make_counting_source(4), global_batch_size=0)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_split_batches_keeps_rows_and_order(num_replicas):
    data = {"x": np.arange(22.0).reshape(11, 2), "y": (np.arange(11), np.arange(11) * 2)}
    batches = tf.data.Dataset.from_tensor_slices(data).batch(4)
    elements = list(split_batches(batches, num_replicas=num_replicas).as_numpy_iterator())
    parts = [part for part, _ in elements]
    assert [place.tolist() for _, place in elements[:num_replicas]] == {
        1: [[0, 4]],
        2: [[0, 4], [2, 4]],
        3: [[0, 4], [2, 4], [3, 4]],
    }[num_replicas]
    assert len(parts) == 3 * num_replicas
    joined = tf.nest.map_structure(lambda *leaves: np.concatenate(leaves), *parts)
    assert_same(joined, data)
    if num_replicas == 3:
        assert [len(part["x"]) for part in parts[:3]] == [2, 1, 1]


def test_split_batches_gives_small_batches_to_all_replicas():
    batches = tf.data.Dataset.range(6).batch(4)
    parts = list(split_batches(batches, num_replicas=3).as_numpy_iterator())
    assert [(part.tolist(), place.tolist()) for part, place in parts] == [
        ([0, 1], [0, 4]),
        ([2], [2, 4]),
        ([3], [3, 4]),
        *[([4, 5], [0, 2])] * 3,
    ]


def test_split_batches_keeps_tuples_and_static_shapes():
    batches = tf.data.Dataset.from_tensor_slices((np.zeros((8, 3)),)).batch(4, drop_remainder=True)
    parts = split_batches(batches, num_replicas=2, replicas=[1])
    assert parts.element_spec[0] == (tf.TensorSpec((2, 3), tf.float64),)
    uneven = split_batches(batches, num_replicas=3)
    assert uneven.element_spec[0] == (tf.TensorSpec((None, 3), tf.float64),)


def test_split_batches_refuses_batches_without_rows():
    dataset = split_batches(tf.data.Dataset.from_tensors(np.zeros((0, 3))), num_replicas=2)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        list(dataset)
    error = as_user_error(caught.value)
    assert str(error).startswith("Cannot train on a batch without examples")


def test_split_batches_refuses_scalars_and_sparse_tensors():
    with pytest.raises(TfdistError, match=r"scalars .* \.batch\("):
        split_batches(tf.data.Dataset.range(5), num_replicas=2)
    sparse = tf.data.Dataset.from_tensors(tf.sparse.eye(4))
    with pytest.raises(TfdistError, match="SparseTensorSpec over replicas"):
        split_batches(sparse, num_replicas=2)


def test_a_strategy_hands_each_replica_its_own_rows(shapes, one_replica):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def make_dataset(context):
        assert context.num_replicas_in_sync == 2
        return make_train_dataset(
            shapes, global_batch_size=8, seed=3, num_replicas=2, augmentation=AUGMENTATION
        )

    iterator = iter(strategy.distribute_datasets_from_function(make_dataset))
    for expected in one_replica[:3]:
        parts = [strategy.experimental_local_results(leaf) for leaf in next(iterator)]
        assert_same(tuple(np.concatenate(part) for part in parts), expected)


def test_no_dataset_leaves_a_thread_that_tunes_it(shapes):
    datasets = [
        make_train_dataset(shapes, global_batch_size=8, seed=0),
        make_eval_dataset(shapes, global_batch_size=8),
        split_batches(tf.data.Dataset.range(8).batch(4), num_replicas=2),
    ]
    for dataset in datasets:
        options = dataset.options()
        assert options.autotune.enabled is False
        assert options.deterministic


class EvenAreZero(Source):
    """A source of a user, whose code AutoGraph converts."""

    @property
    def element_spec(self):
        return tf.TensorSpec([], tf.int64)

    def load(self, index):
        if index % 2 == 0:
            value = tf.zeros([], tf.int64)
        else:
            value = index
        return value


def test_a_source_may_use_an_if_on_a_tensor():
    source = EvenAreZero(num_examples=4)
    train = make_train_dataset(source, global_batch_size=4, seed=0, shuffle=False)
    assert next(train.as_numpy_iterator()).tolist() == [0, 1, 0, 3]
    batch, _ = next(make_eval_dataset(source, global_batch_size=4).as_numpy_iterator())
    assert batch.tolist() == [0, 1, 0, 3]
