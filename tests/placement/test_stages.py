"""Where a model is cut, and what its stages exchange."""

import itertools

import keras
import pytest

from tfdist import models
from tfdist.errors import TfdistError
from tfdist.placement.costs import Cost, estimate_costs
from tfdist.placement.graph import make_graph
from tfdist.placement.stages import cutting


@pytest.fixture(scope="module")
def unet():
    model = models.make_model(
        "unet", image_size=(32, 32), num_classes=3, base_filters=4, depth=2, norm="none"
    )
    graph = make_graph(model)
    return graph, estimate_costs(graph)


def _cost(work):
    return Cost(flops=work, activations=0.0, weights=0.0)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_cuts_make_the_largest_share_as_small_as_possible(count):
    works = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]

    def largest(places):
        bounds = [0, *places, len(works)]
        return max(sum(works[a:b]) for a, b in itertools.pairwise(bounds))

    found = cutting.balance([_cost(work) for work in works], count)
    assert len(found) == count - 1
    every = itertools.combinations(range(1, len(works)), count - 1)
    assert largest(found) == min(largest(places) for places in every)


def test_more_devices_than_operations_leave_some_unused():
    assert cutting.balance([_cost(1.0)] * 3, 5) == [1, 2]


def test_weights_that_would_fill_half_of_a_device_are_balanced_too():
    costs = [Cost(flops=work, activations=0.0, weights=100.0) for work in (3.0, 1.0, 1.0, 1.0)]
    assert cutting.balance(costs, 2) == [1]
    assert cutting.balance(costs, 2, device_memory=2400) == [1]
    assert cutting.balance(costs, 2, device_memory=2399) == [2]


def test_counts_the_operations_of_convolutions():
    inputs = keras.Input((8, 8, 3))
    model = keras.Model(inputs, keras.layers.Conv2D(4, 3, padding="same")(inputs))
    (cost,) = estimate_costs(make_graph(model))
    assert cost.flops == pytest.approx(2 * 8 * 8 * 3 * 3 * 3 * 4, rel=0.05)  # and the bias
    assert cost.activations == 4 * 8 * 8 * 4
    assert cost.weights == 4 * (3 * 3 * 3 * 4 + 4)


def test_stages_hold_every_operation_once_and_pass_what_others_take(unet):
    graph, costs = unet
    found = cutting.cut(graph, cutting.balance(costs, 3))
    assert [stage.device for stage in found] == [0, 1, 2]
    assert [op for stage in found for op in stage.operations] == list(graph.operations)
    passed = {(number, taker) for stage in found for number, taker in stage.outputs}
    for place, stage in enumerate(found):
        for number in set(stage.inputs) - set(graph.inputs):
            assert (number, place) in passed
    assert (graph.outputs[0], len(found)) in passed


def test_rematerialization_keeps_less_than_the_stages_by_level(unet):
    graph, costs = unet
    by_level = cutting.find_starts(
        graph, ["encoder_1", "bottleneck", "decoder_1", "decoder_0", "head"]
    )
    best = cutting.balance_memory(graph, costs)
    kept = [cutting.count_kept(cutting.cut(graph, p), costs, graph) for p in (best, by_level)]
    assert kept[0] <= kept[1]


def test_branches_run_together_on_their_devices():
    given = keras.Input((4,))
    left = keras.layers.Dense(3, name="left_2")(keras.layers.Dense(3, name="left_1")(given))
    right = keras.layers.Dense(3, name="right_2")(keras.layers.Dense(3, name="right_1")(given))
    graph = make_graph(keras.Model(given, keras.layers.Add(name="joined")([left, right])))
    found = cutting.assign(graph, {"right_*": 1})
    assert [(stage.name, stage.device, len(stage.operations)) for stage in found] == [
        ("right_1", 1, 2),
        ("left_1", 0, 3),
    ]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["decodr_1"], "`stages`.*'decodr_1'"),
        (["decoder_0", "decoder_1"], "are not in the order in which the layers run"),
    ],
)
def test_wrong_stages_cost_one_line(unet, names, message):
    with pytest.raises(TfdistError, match=message) as caught:
        cutting.find_starts(unet[0], names)
    assert "\n" not in str(caught.value)
