"""A worker of tests/strategies/test_process_sums.py: `python -m ... DIRECTORY`."""

import json
import sys
from pathlib import Path

from tfdist.cli.quiet import start_tensorflow_quietly

SIZES = (1, 2, 5, 4000, 40000)


def main(directory):
    start_tensorflow_quietly()
    import tensorflow as tf

    from tfdist.cluster import find_tf_config
    from tfdist.strategies import make_multi_worker_mirrored

    strategy = make_multi_worker_mirrored()
    index = find_tf_config().index
    found = {}

    def add(value):
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.identity(value))

    @tf.function(autograph=False)
    def run(x):
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(add(tf.reduce_sum(x)) * x)
            slope = tape.gradient(loss, x)
            number = tf.cast(add(tf.shape(x)[0]), tf.float32)
            return tf.stack([loss, slope[0], number])

        # One number for each of the sums of a step, in a function, and in a loop of steps.
        def repeat(i, y):
            return i + 1, y + nested(x)

        nested = tf.function(lambda x: strategy.run(step, args=(x,)), autograph=False)
        once = strategy.run(step, args=(x,))
        return once, tf.while_loop(lambda i, _: i < 3, repeat, [0, once])[1]

    # Worker 1 traces at each length, the others once: their sums must not lose each other.
    for length in range(1, 4):
        x = tf.ones([length]) * float(index + 1)
        concrete = run.get_concrete_function(tf.TensorSpec([None], tf.float32))
        values = run(x) if index == 1 else concrete(x)
        found[f"length {length}"] = [value.numpy().tolist() for value in values]
    for dtype in ("float32", "float64", "bfloat16", "int64"):
        for size in SIZES:
            value = tf.cast(tf.range(size) % 2 + index, dtype)

            @tf.function(autograph=False)
            def total(value=value):
                return strategy.run(lambda: add(value))

            found[f"{dtype} {size}"] = tf.cast(total()[:9], tf.float64).numpy().tolist()
    # What computes a sum, and whether it waits for the sums that were traced before it.
    found["operations"] = {}
    for size in SIZES:

        @tf.function(autograph=False)
        def total(size=size):
            return strategy.run(lambda: add(tf.zeros([size])))

        nodes = total.get_concrete_function().graph.as_graph_def().node
        found["operations"][size] = [
            [node.op, node.attr["Nordering_token"].i] for node in nodes if "Collective" in node.op
        ]
    (Path(directory) / f"worker-{index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
