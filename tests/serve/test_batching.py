"""The batcher, with a real SavedModel."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.serve.batching import Batcher
from tfdist.serve.options import BatchingOptions
from tfdist.serve.servable import RequestError, Servable
from tfdist.tasks.divided_signature import DividedSignature


class Model(tf.Module):
    """Doubles rows of any length; refuses negative numbers; sums what it is given at once."""

    def __init__(self):
        self.factor = tf.Variable(2.0)

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.float32, name="x")])
    def double(self, x):
        with tf.control_dependencies([tf.debugging.assert_non_negative(x, "negative")]):
            return {"y": x * self.factor}

    @tf.function(input_signature=[tf.TensorSpec([2], tf.float32, name="x")])
    def total(self, x):
        return {"y": tf.reduce_sum(x)}

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.float32, name="x")])
    def invert(self, x):
        return {"inverse": tf.linalg.inv(x[:, :1, None])[:, 0, 0], "same": x[:, 0]}

    @tf.function(input_signature=[tf.TensorSpec([], tf.string, name="text")])
    def read(self, text):
        return {"number": tf.strings.to_number(text)}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, name="number")])
    def answer(self, number):
        return {"y": number * self.factor, "z": number + self.factor}


@pytest.fixture(scope="module")
def servable(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("a model"))
    model = Model()
    texts = DividedSignature("texts", model.read, model.answer)
    model.read_texts, model.answer_texts = texts.functions.values()
    assert list(texts.functions) == ["read_texts", "answer_texts"]
    tf.saved_model.save(
        model,
        path,
        signatures={
            "texts": texts.whole,
            "serving_default": model.double,
            "total": model.total,
            "inverse": model.invert,
        },
    )
    return Servable(path, version=1, devices=("CPU:0", "CPU:1"), num_calls=2)


def run(servable, requests, signature="serving_default", **options):
    """The answers or errors of requests that arrive together, and the sizes of the batches."""
    sizes = []

    async def send():
        with ThreadPoolExecutor(2) as executor:
            batcher = Batcher(
                BatchingOptions(**options), executor, num_threads=2, observe=sizes.append
            )
            chosen = servable.signatures[signature]
            jobs = (batcher.run(servable, chosen, {"x": x}) for x in requests)
            answers = await asyncio.gather(*jobs, return_exceptions=True)
            assert batcher.num_waiting == 0
            return answers

    return asyncio.run(send()), sizes


def rows(*values, length=3):
    return np.array([[value] * length for value in values], np.float32)


def test_requests_of_a_shape_share_a_batch(servable):
    requests = [rows(1), rows(2, 3), rows(4, length=5), rows(5), rows(6, length=5)]
    answers, sizes = run(servable, requests, max_batch_size=8, batch_timeout_micros=50_000)
    for request, answer in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(answer["y"], 2 * request)
    assert sorted(sizes) == [2, 4]


def test_a_large_request_is_split(servable):
    request = rows(*range(21))
    answers, sizes = run(servable, [request], max_batch_size=8)
    np.testing.assert_array_equal(answers[0]["y"], 2 * request)
    assert sorted(sizes) == [5, 8, 8]


def test_a_bad_request_fails_alone(servable):
    requests = [rows(1), rows(-1), rows(3)]
    answers, sizes = run(servable, requests, max_batch_size=3, batch_timeout_micros=10**6)
    assert sizes == [3]
    np.testing.assert_array_equal(answers[0]["y"], rows(2))
    np.testing.assert_array_equal(answers[2]["y"], rows(6))
    with pytest.raises(RequestError, match="cannot compute this request: .*negative"):
        raise answers[1]


def test_a_full_queue_refuses(servable):
    requests = [rows(i) for i in range(12)]  # three full batches, for which nobody waits
    answers, _ = run(
        servable, requests, max_batch_size=4, max_enqueued_batches=1, batch_timeout_micros=10**7
    )
    refused = [answer for answer in answers if isinstance(answer, RequestError)]
    # Two threads take a batch each, a third one waits.
    assert not refused
    answers, _ = run(
        servable, requests * 4, max_batch_size=4, max_enqueued_batches=1, batch_timeout_micros=10**7
    )
    refused = [answer for answer in answers if isinstance(answer, RequestError)]
    assert len(refused) == 48 - 12
    assert {error.status for error in refused} == {503}


def test_outputs_that_no_request_of_a_batch_needs_are_not_computed(servable):
    found = servable.run("inverse", {"x": rows(4)})
    assert (found["inverse"], found["same"]) == (0.25, 4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not invertible"):
        servable.run("inverse", {"x": rows(0)})
    found = servable.run("inverse", {"x": rows(0)}, outputs=["same"])
    assert {name: list(values) for name, values in found.items()} == {"same": [0]}


def test_requests_for_other_outputs_have_batches_of_their_own(servable):
    async def send():
        with ThreadPoolExecutor(2) as executor:
            batcher = Batcher(BatchingOptions(), executor, num_threads=2)
            signature = servable.signatures["inverse"]
            return await asyncio.gather(
                batcher.run(servable, signature, {"x": rows(4)}),
                batcher.run(servable, signature, {"x": rows(0)}, outputs=["same"]),
                batcher.run(servable, signature, {"x": rows(2)}),
            )

    whole, part, other = asyncio.run(send())
    assert (whole["inverse"], other["inverse"]) == (0.25, 0.5)
    assert part.keys() == {"same"}


def test_batches_are_filled_up_to_the_allowed_sizes(servable):
    shapes = []

    class Recorder:
        def run(self, name, inputs, outputs):
            shapes.append(len(inputs["x"]))
            return servable.run(name, inputs, outputs=outputs)

    recorder = Recorder()
    recorder.signatures = servable.signatures
    answers, sizes = run(recorder, [rows(1, 2, 3)], max_batch_size=8, allowed_batch_sizes=(1, 4, 8))
    np.testing.assert_array_equal(answers[0]["y"], rows(2, 4, 6))
    assert (shapes, sizes) == ([4], [3])


def test_a_signature_without_a_batch_axis_is_run_for_each_request(servable):
    requests = [np.array([i, 1], np.float32) for i in range(3)]
    answers, sizes = run(servable, requests, signature="total")
    assert [answer["y"] for answer in answers] == [1, 2, 3]
    assert sizes == [1, 1, 1]


def test_what_nobody_waits_for_is_not_computed(servable):
    sizes = []

    async def send():
        with ThreadPoolExecutor(1) as executor:
            options = BatchingOptions(batch_timeout_micros=0)
            batcher = Batcher(options, executor, num_threads=1, observe=sizes.append)
            release = threading.Event()
            executor.submit(release.wait)
            signature = servable.signatures["serving_default"]
            first = asyncio.ensure_future(batcher.run(servable, signature, {"x": rows(1)}))
            await asyncio.sleep(0.05)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await batcher.run(servable, signature, {"x": rows(1, 2, 3)})
            release.set()
            await first

    asyncio.run(send())
    assert sizes == [1]


@pytest.mark.parametrize("sizes", [(4, 2, 8), (2, 4)])
def test_allowed_sizes_increase_up_to_the_largest_batch(sizes):
    with pytest.raises(TfdistError, match="must increase and end with `max_batch_size=8`"):
        BatchingOptions(max_batch_size=8, allowed_batch_sizes=sizes)


def test_the_parts_of_a_divided_signature_are_the_whole_of_it(servable):
    assert [servable.is_divided(name) for name in servable.signatures] == [
        name == "texts" for name in servable.signatures
    ]
    texts = {"text": np.array([b"1", b"-2.5", b"3"], object)}
    read = servable.read("texts", texts)
    assert {name: list(values) for name, values in read.items()} == {"number": [1, -2.5, 3]}
    answer = servable.run("texts", read)
    whole = tf.saved_model.load(servable.path).signatures["texts"](**texts)
    for name in ("y", "z"):
        np.testing.assert_array_equal(answer[name], whole[name])
    assert servable.run("texts", read, outputs=["z"]).keys() == {"z"}
    with pytest.raises(RequestError, match=r"text\[1\] cannot be read: .*StringToNumber"):
        servable.read("texts", {"text": np.array([b"1", b"one"], object)})
