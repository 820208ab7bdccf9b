"""What the graphs of TensorFlow's functions are made of."""

import tensorflow as tf


def list_operations(graph: tf.Graph) -> list[tf.compat.v1.NodeDef]:
    """Returns the operations of a graph and of its functions."""
    definition = graph.as_graph_def()
    functions = (node for function in definition.library.function for node in function.node_def)
    return [*definition.node, *functions]
