"""Measures one thing in processes of its own, for `tfdist.plan.calibrate`."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from tfdist.cli.flags import parse_flags
from tfdist.runs.options import TrainOptions

_SMALL, _LARGE = 1 << 10, 8 << 20  # float32 values
_CHAIN = 33
_ROUNDS = 9
_SIDE = 512  # of matrices, whose product takes some milliseconds
_WARMUP_STEPS = 9  # local_sgd averages for the first time after 8, by default
_WINDOWS, _ENOUGH_S = 4, 6.0  # so many windows, or as many as begin in so many seconds
_MAX_BYTES = 1 << 28  # of the examples that are kept in memory


def measure(task: dict[str, Any]) -> dict[str, float] | None:
    """Measures what a task describes: the steps of a training command, or links, or the machine."""
    return _MEASURES[task["what"]](parse_flags(TrainOptions, task["arguments"]), task)


def measure_steps(options: TrainOptions, task: dict[str, Any]) -> dict[str, float] | None:
    """Trains a command's model on a few of its examples, which are kept in memory.

    Returns:
      `step_s`, the mean seconds of a step, and `busy`, the share of its cores that the process
      keeps busy, in the fastest window of as many steps as the task says, because other programs
      only slow it down; and its `peak_memory_bytes`. None in a process that is not the chief.
    """
    import keras
    import tensorflow as tf

    from tfdist import devices
    from tfdist.runs import processes
    from tfdist.runs.clock import Clock
    from tfdist.strategies.servers import run_server
    from tfdist.tasks.data import to_sources
    from tfdist.training.fit.trainer import Trainer

    options, config = processes.start_process(options)
    has_servers = options.strategy.select().traits.has_servers
    if config and not config.is_chief and has_servers:
        run_server(config)
        return None
    strategy = processes.build_strategy(options)
    chosen, training = options.task.select(), options.training
    data = to_sources(chosen.make_data(seed=training.seed, quiet=True))
    batch = training.global_batch_size
    clock, length = Clock(), task["steps"]
    steps = _WARMUP_STEPS + _WINDOWS * length
    first = data.train.load_batch(tf.range(1, dtype=tf.int64))
    num_bytes = sum(part.numpy().nbytes for part in tf.nest.flatten(first))
    # One epoch, unless it takes too much memory: at its end, which is not measured, some strategies
    # have more to do.
    count = batch * max(2, min(steps + 1, _MAX_BYTES // (batch * num_bytes)))
    places = tf.range(count, dtype=tf.int64) % data.train.num_examples
    arrays = tf.nest.map_structure(lambda part: part.numpy(), data.train.load_batch(places))
    x, y, weight = keras.utils.unpack_x_y_sample_weight(arrays)
    trainer = Trainer(
        processes.make_build_model(chosen, training, data.info, total_steps=100),
        strategy=strategy,
        seed=training.seed,
        step_options=options.step,
        placement=options.placement.select(),
    )

    def end(batch: int, logs: dict[str, Any] | None) -> None:
        windows = clock.list_windows(_WARMUP_STEPS, length)
        if windows and clock.measure_seconds(_WARMUP_STEPS, windows[-1][1]) > _ENOUGH_S:
            trainer.request_stop()

    trainer.fit(
        x,
        y,
        sample_weight=weight,
        global_batch_size=batch,
        max_steps=steps + 1,
        callbacks=[clock, keras.callbacks.LambdaCallback(on_train_batch_end=end)],
        verbose=0,
    )
    if config and not config.is_chief:
        return None
    windows = clock.list_windows(_WARMUP_STEPS, length)
    fastest = min(windows, key=lambda window: clock.measure_seconds(*window))
    return {
        "step_s": clock.measure_seconds(*fastest) / length,
        "busy": clock.measure_busy(*fastest),
        "peak_memory_bytes": devices.measure_peak_memory(),
    }


def measure_links(options: TrainOptions, task: dict[str, Any]) -> dict[str, float] | None:
    """Sums tensors over the two replicas of a strategy.

    Returns:
      `latency_s` of a message and `bytes_per_s` of a link, if the sum is a ring's.
    """
    import tensorflow as tf

    from tfdist.runs import processes
    from tfdist.training.replicas.reduction import sum_over_replicas

    options, config = processes.start_process(options)
    strategy = processes.build_strategy(options)
    # As gradients, variables are not known when the graph is made.
    with strategy.scope():
        values = {size: tf.Variable(tf.zeros([size])) for size in (_SMALL, _LARGE)}
        matrix = tf.Variable(tf.ones([_SIDE, _SIDE]) / _SIDE)

    def make(size: int, count: int, *, sums: bool = True) -> Callable[[], None]:
        def reduce() -> tf.Tensor:
            total = tf.identity(values[size])
            for index in range(count):
                # TensorFlow would join sums of sums, into ever longer ones.
                total = tf.tanh(total) if index else total
                # Between two sums, a worker computes, and not always as fast as the others.
                if config and count > 1:
                    total += tf.matmul(matrix, matrix + total[0])[0, 0]
                if sums:
                    total = sum_over_replicas([total], is_compressed=False)[0]
            return tf.cast(total[0], tf.float32)

        @tf.function(autograph=False)
        def run() -> Any:
            return strategy.experimental_local_results(strategy.run(reduce))

        def wait() -> None:
            for result in run():
                float(result)

        return wait

    # In a step, sums follow one another without the host, whose call is a part of each of these.
    chains = [make(_SMALL, _CHAIN, sums=sums) for sums in (False, True)]
    large = [make(size, 1) for size in (_SMALL, _LARGE)]
    if config and not config.is_chief:
        for each in (chains, large):
            _time_difference(*each)
        return None
    return {
        "latency_s": max(_time_difference(*chains), 0.0) / _CHAIN / 2,
        "bytes_per_s": 4 * _LARGE / max(_time_difference(*large), 1e-9),
    }


def measure_machine(options: TrainOptions, task: dict[str, Any]) -> dict[str, float]:
    """Measures matrix products, copies, and the reading of a command's examples.

    Returns:
      `flops_per_s`, `memory_bytes_per_s`, `memory_bytes`, and `examples_per_s`.
    """
    import tensorflow as tf

    from tfdist import memory
    from tfdist.runs import processes
    from tfdist.runs.clock import time_call
    from tfdist.tasks.data import to_sources

    options, _ = processes.start_process(options)
    precision = options.training.precision
    dtype = tf.bfloat16 if precision == "mixed_bfloat16" else tf.float32
    matrix = tf.cast(tf.random.stateless_normal([2048, 2048], [0, 1]), dtype)
    big = tf.zeros([64 << 20], tf.float32)
    product = tf.function(lambda: tf.matmul(matrix, matrix)[0, 0])
    copy = tf.function(lambda: (big + 1.0)[0])
    data = to_sources(options.task.select().make_data(seed=options.training.seed, quiet=True))
    batch = min(options.training.global_batch_size, data.train.num_examples)
    read = tf.function(lambda: data.train.load_batch(tf.range(batch, dtype=tf.int64)))
    for function in (product, copy, read):
        function()  # traces
    return {
        "flops_per_s": 2 * 2048.0**3 / time_call(product),
        "memory_bytes_per_s": 2 * 4 * (64 << 20) / time_call(copy),
        "memory_bytes": float(memory.find_free_memory().bytes),
        "examples_per_s": batch / time_call(read),
    }


def _time_difference(shorter: Callable[[], Any], longer: Callable[[], Any]) -> float:
    """Returns the median difference of the seconds of two functions that run in turns."""
    times = []
    for _ in range(_ROUNDS + 1):
        marks = [time.perf_counter()]
        for run in (shorter, longer):
            run()
            marks.append(time.perf_counter())
        times.append(marks[2] - marks[1] - (marks[1] - marks[0]))
    return statistics.median(times[1:])  # the first calls trace


_MEASURES = {"steps": measure_steps, "links": measure_links, "machine": measure_machine}
