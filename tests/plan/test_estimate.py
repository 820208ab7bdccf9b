"""The estimates of setups: what they must be, whatever the numbers of a model are."""

import dataclasses
import math

import keras
import pytest

from tfdist.models import make_model
from tfdist.placement.costs import estimate_costs
from tfdist.placement.graph import make_graph
from tfdist.placement.stages.cutting import balance
from tfdist.plan.answer import estimate_all
from tfdist.plan.collectives import expect_slowest, make_path, time_hierarchical
from tfdist.plan.compute import cut_stages, time_layers, time_pipeline
from tfdist.plan.estimate import estimate
from tfdist.plan.hardware import Measured, load_hardware
from tfdist.plan.recommend import recommend
from tfdist.plan.setup import Setup, list_setups
from tfdist.plan.workload import Workload, count_state, make_layers

ONE = Setup(strategy="one_device")


@pytest.fixture(scope="module")
def model():
    return make_model("unet", image_size=(32, 32), num_classes=3, base_filters=8, depth=2)


@pytest.fixture(scope="module")
def workload(model):
    optimizer = keras.optimizers.Adam()
    return Workload(
        layers=make_layers(model),
        global_batch_size=256,
        optimizer=count_state(optimizer, model.trainable_variables),
        num_examples=10_000,
    )


def remove_sums(workload):
    """Returns the workload with each replica's own batch normalization."""
    layers = tuple(dataclasses.replace(layer, sums=0) for layer in workload.layers)
    return dataclasses.replace(workload, layers=layers)


def test_a_workload_has_the_models_parameters(model, workload):
    assert workload.weights == 4 * model.count_params()
    assert workload.gradients == 4 * sum(math.prod(v.shape) for v in model.trainable_variables)
    assert workload.optimizer == pytest.approx(2.0, rel=0.01)  # Adam's two moments
    assert workload.sums == 2 * sum("Normal" in type(x).__name__ for x in model.layers)


def test_keras_s_batch_normalization_sums_as_the_step_does():
    layers = [keras.layers.BatchNormalization(synchronized=is_set) for is_set in (False, True)]
    frozen = keras.layers.BatchNormalization(trainable=False)
    model = keras.Sequential([keras.Input((4,)), *layers, frozen])
    counts = {
        syncs: [layer.sums for layer in make_layers(model, syncs=syncs) if layer.weights]
        for syncs in (True, False)
    }
    assert counts == {True: [2, 2, 0], False: [1, 2, 0]}


def test_what_sends_itself_does_not_hide_the_sums_of_gradients(workload):
    workload = dataclasses.replace(remove_sums(workload), bytes_per_pack=4096)
    setup = Setup(strategy="multi_worker_mirrored", workers=4)
    hides = dataclasses.replace(load_hardware("cpu"), sends_itself=False, exchange_s=0.0)
    whole = time_hierarchical(
        1, 4, workload.gradients, *(make_path(hides, x) for x in (hides.inside, hides.between))
    )
    hidden, exposed = (
        estimate(setup, workload, each).communication_s for each in (hides, load_hardware("cpu"))
    )
    assert hidden < 0.9 * exposed
    assert exposed >= whole


def test_memory_is_counted_by_hand(workload):
    found = estimate(ONE, workload, load_hardware("a100")).memory
    assert found.weights + found.gradients + found.optimizer == pytest.approx(
        workload.weights + workload.gradients * (1 + workload.optimizer)
    )
    assert found.activations == 256 * sum(x.activations for x in workload.layers)


def test_rematerialization_and_micro_batches_trade_time_for_memory(workload):
    hardware = load_hardware("v100")
    plain = estimate(ONE, workload, hardware)
    again = dataclasses.replace(workload, rematerialized=workload.activations / 4)
    computed = estimate(ONE, again, hardware)
    assert computed.memory.activations == pytest.approx(plain.memory.activations / 4)
    assert computed.computation_s == pytest.approx(plain.computation_s * 4 / 3, rel=0.01)
    parts = estimate(ONE.split(4), workload, hardware)
    assert parts.memory.activations == pytest.approx(plain.memory.activations / 4)
    assert parts.computation_s > plain.computation_s


def test_replicas_halve_the_activations_and_keep_the_weights(workload):
    hardware = load_hardware("a100")
    one = estimate(ONE, workload, hardware).memory
    two = estimate(Setup(strategy="mirrored", replicas=2), workload, hardware).memory
    assert two.activations == one.activations / 2
    assert two.weights == one.weights


def test_what_does_not_fit_is_said(workload):
    small = dataclasses.replace(load_hardware("a100"), memory_bytes=0.7e9)
    found = estimate(ONE, workload, small)
    assert found.missing == pytest.approx(found.memory.total - 0.63e9)
    assert not found.is_possible


def test_the_stages_are_those_of_training(model, workload):
    costs, hardware = estimate_costs(make_graph(model)), load_hardware("a100")
    for memory in (80e9, 1e6):
        small = dataclasses.replace(hardware, memory_bytes=memory)
        found = [first for first, _ in cut_stages(workload, small, 3)[1:]]
        assert found == balance(costs, 3, device_memory=memory)


def test_micro_batches_shrink_the_bubble(workload):
    hardware = dataclasses.replace(load_hardware("v100"), operation_s=0.0)
    setup = Setup(strategy="one_device", placement="layers", parts=2)
    bubbles = [
        found.bubble_s / (found.computation_s + found.bubble_s)
        for count in (1, 4, 32)
        for found in [estimate(dataclasses.replace(setup, micro_batches=count), workload, hardware)]
    ]
    assert bubbles[0] == pytest.approx(0.5, abs=0.02)
    assert bubbles == sorted(bubbles, reverse=True)
    # With equal stages, (p - 1) / (m + p - 1) of the time.
    assert 1 - 8 * 4 / (4 * time_pipeline([1.0] * 4, 8)) == pytest.approx(3 / 11)


@pytest.mark.parametrize("name", ["a100", "k80", "cpu"])
def test_the_parts_of_a_step_add_up(workload, name):
    hardware = load_hardware(name)
    for setup in list_setups(hardware, workload, workers=4, devices=4):
        found = estimate(setup, workload, hardware)
        parts = (
            found.computation_s
            + found.communication_s
            + found.bubble_s
            + found.wait_s
            + found.input_s
            + found.host_s
        )
        assert parts == pytest.approx(found.step_s)
        assert 0 < found.efficiency <= 1.001, setup


def test_a_slow_input_limits_the_speed(workload):
    hardware = dataclasses.replace(load_hardware("a100"), examples_per_s=100.0)
    assert estimate(ONE, workload, hardware).examples_per_s == pytest.approx(100.0)
    two = estimate(Setup(strategy="mirrored", replicas=2), workload, hardware)
    assert two.examples_per_s == pytest.approx(100.0)  # a machine's, not a replica's
    far = Setup(strategy="multi_worker_mirrored", workers=2)
    assert estimate(far, workload, hardware).examples_per_s == pytest.approx(200.0)


def test_the_cores_of_a_machine_limit_the_speed(workload):
    workload = dataclasses.replace(workload, example_core_s=0.5)
    hardware = dataclasses.replace(load_hardware("a100"), cores=100)
    for setup, machines in (
        (ONE, 1),
        (Setup(strategy="mirrored", replicas=2), 1),
        (Setup(strategy="multi_worker_mirrored", workers=2), 2),
    ):
        found = estimate(setup, workload, hardware)
        assert found.examples_per_s == pytest.approx(machines * 100 / 0.5)
        assert found.input_s > 0
    unknown = dataclasses.replace(hardware, cores=0)
    assert estimate(ONE, workload, unknown).input_s == 0


def test_accelerators_start_an_exchange_of_gradients(model, workload):
    workload = remove_sums(workload)
    assert workload.tensors == len(model.trainable_variables)
    two = Setup(strategy="multi_worker_mirrored", replicas=2)
    hardware = load_hardware("a100")
    apart = dataclasses.replace(hardware, exchange_s=0.0, operation_s=0.0)
    free, whole = (estimate(two, workload, each).communication_s for each in (apart, hardware))
    started = hardware.exchange_s + 2 * workload.tensors * hardware.operation_s
    # Hardware without a least time of an operation hides less behind its shorter computation.
    assert started <= whole <= started + free
    cpu = load_hardware("cpu")
    other = dataclasses.replace(cpu, exchange_s=1.0)
    assert estimate(two, workload, cpu) == estimate(two, workload, other)
    assert estimate(ONE, workload, hardware).communication_s == 0
    one_process = Setup(strategy="mirrored", replicas=2)
    slower = dataclasses.replace(hardware, exchange_s=1.0)
    assert estimate(one_process, workload, hardware) == estimate(one_process, workload, slower)


def test_replicas_wait_for_the_slowest_device_and_the_slowest_machine(workload):
    hardware = load_hardware("a100")
    for workers, replicas in ((1, 8), (2, 4), (8, 1)):
        setup = Setup(strategy="multi_worker_mirrored", workers=workers, replicas=replicas)
        found = estimate(setup, workload, hardware)
        deviations = expect_slowest(8) + expect_slowest(workers)
        assert found.wait_s == pytest.approx(0.02 * found.computation_s * deviations)


def measure(workload, **busy):
    """A measurement of a model: 100 ms for a step, and 10 ms for each example."""
    return Measured(
        parameters=round(workload.weights / 4),
        flops=workload.flops,
        precision="float32",
        step_s=0.1,
        example_s=0.01,
        **busy,
    )


def test_a_measured_model_is_as_fast_as_measured(workload):
    measured = measure(workload)
    hardware = dataclasses.replace(load_hardware("cpu"), measured=(measured,), host_s=0.0)
    assert estimate(ONE, workload, hardware).step_s == pytest.approx(0.1 + 256 * 0.01)
    other = dataclasses.replace(workload, precision="mixed_bfloat16")
    assert sum(time_layers(other, hardware, 256)) != pytest.approx(256 * 0.01)


def test_devices_that_share_cores_compute_in_turns(workload):
    hardware = dataclasses.replace(load_hardware("cpu"), shares_cores=True)
    alone = estimate(ONE, workload, hardware)
    for setup in (
        Setup(strategy="mirrored", replicas=2),
        Setup(strategy="multi_worker_mirrored", workers=2),
        Setup(strategy="one_device", placement="strips", parts=2),
    ):
        assert estimate(setup, workload, hardware).step_s >= alone.step_s


def test_normalization_with_the_moments_of_all_replicas_reads_images_again(workload):
    hardware = load_hardware("a100")
    convolutions = [workload.layers[x.inputs[0]] for x in workload.layers if x.sums]
    images = sum(x.activations for x in convolutions) * 256 / 4
    reread = 7 * images / (hardware.memory_bytes_per_s * hardware.memory_share)
    pooling = len(convolutions) * 57 * hardware.operation_s
    again = reread + pooling
    apart = remove_sums(workload)
    for setup, additional in (
        (Setup(strategy="mirrored", replicas=4), again),
        (Setup(strategy="multi_worker_mirrored", workers=2, replicas=2), again),
        (Setup(strategy="mirrored", replicas=4, placement="layers", parts=2), again / 2),
        (Setup(strategy="mirrored", replicas=4, placement="strips", parts=2), again / 2),
        (Setup(strategy="one_device", placement="strips", parts=4), reread + pooling / 4),
        (Setup(strategy="local_sgd", workers=4), 0.0),
        (Setup(strategy="parameter_server", workers=4, servers=1), 0.0),
        (ONE, 0.0),
    ):
        both = [estimate(setup, each, hardware).computation_s for each in (workload, apart)]
        assert both[0] - both[1] == pytest.approx(additional, abs=1e-9)


def test_the_parts_of_a_grid_have_shorter_borders_than_strips(workload):
    hardware = load_hardware("a100")
    borders = sum(x.halo for x in workload.layers if x.halo > 0)
    assert borders == sum(x.side for x in workload.layers if x.side > 0) > 0  # square images
    exchanged = 2 * 256 * borders / (hardware.inside.bytes_per_s * hardware.link_share)
    seconds = {
        grid: estimate(
            Setup(strategy="one_device", placement="strips", parts=grid[0] * grid[1], grid=grid),
            workload,
            hardware,
        ).communication_s
        for grid in ((2, 1), (4, 1), (16, 1), (1, 4), (2, 2), (4, 4))
    }
    # In sides of the image: a strip takes one or two; of a grid, both neighbors' shorter ones.
    sides = {(2, 1): 1, (4, 1): 2, (16, 1): 2, (1, 4): 2, (2, 2): 1, (4, 4): 1}
    for grid, count in sides.items():
        assert seconds[grid] - seconds[2, 1] == pytest.approx((count - 1) * exchanged, abs=1e-9)


def test_grids_are_planned_for_four_and_more_parts(workload):
    setups = list_setups(load_hardware("a100"), workload, workers=1, devices=8)
    grids = {setup.parts: setup for setup in setups if setup.grid}
    assert {parts: setup.grid for parts, setup in grids.items()} == {4: (2, 2), 8: (2, 4)}
    assert grids[8].name == "one_device + strips 2x4"
    assert grids[8].flags.endswith("--mesh=data:1,model:8 --grid=2,4")


def test_processes_with_peers_and_gradients_of_strips_take_memory(workload):
    shared = dataclasses.replace(load_hardware("cpu"), shares_cores=True)
    alone, peers = (
        estimate(Setup(strategy="local_sgd", workers=count), workload, shared).memory.process
        for count in (1, 2)
    )
    assert peers - alone == 110 * 2**20
    strips = Setup(strategy="one_device", placement="strips", parts=2)
    whole, parts = (estimate(s, workload, shared).memory.total for s in (ONE, strips))
    assert parts - whole == pytest.approx(2 * workload.gradients)


def test_replicas_use_the_cores_that_one_of_them_leaves_idle(workload):
    workload = remove_sums(workload)
    measured = measure(workload, step_busy=0.4, example_busy=0.75)
    shared = dataclasses.replace(load_hardware("cpu"), measured=(measured,), shares_cores=True)
    seconds = {
        count: estimate(Setup(strategy="mirrored", replicas=count), workload, shared).computation_s
        for count in (2, 4)
    }
    assert seconds[2] == pytest.approx(0.1 + 128 * 0.01 * 1.5)
    assert seconds[4] == pytest.approx(0.1 * 1.6 + 64 * 0.01 * 3)
    served = Setup(strategy="parameter_server", workers=2, servers=1)
    found = estimate(served, workload, shared)
    assert found.computation_s == pytest.approx(0.1 + 256 * 0.01 * 1.5)
    # On one core, the chief takes its time between two updates.
    assert 256 / found.examples_per_s == pytest.approx(found.step_s / 2 + 0.013)


def test_workers_of_one_machine_have_their_own_cores(workload):
    workload = remove_sums(workload)
    whole = measure(workload)
    half = dataclasses.replace(whole, step_s=0.15, example_s=0.018, share=0.5)
    shared = dataclasses.replace(
        load_hardware("cpu"),
        measured=(whole, half),
        shares_cores=True,
        devices_per_machine=4,
        host_s=0.0,
    )
    for count, longer in ((2, 1), (4, 2)):
        setup = Setup(strategy="multi_worker_mirrored", workers=count)
        seconds = longer * (0.15 + 256 / count * 0.018)
        assert estimate(setup, workload, shared).computation_s == pytest.approx(seconds)
    alone = estimate(ONE, workload, shared)
    assert (alone.step_s, alone.efficiency) == (pytest.approx(0.1 + 256 * 0.01), pytest.approx(1))
    # More workers than cores, and servers, take turns.
    for setup in (
        Setup(strategy="multi_worker_mirrored", workers=8),
        Setup(strategy="parameter_server", workers=2, servers=1),
    ):
        turns = 8 if setup.workers == 8 else 2
        rows = 256 / setup.sharing
        found = estimate(setup, workload, shared)
        assert found.computation_s == pytest.approx(turns * (0.1 + rows * 0.01))


def test_a_sum_on_one_device_costs_more_with_each_replica(workload):
    hardware = load_hardware("v100")
    slow = dataclasses.replace(workload, all_reduce="reduction_to_one_device")
    ratios = []
    for count in (2, 8):
        setup = Setup(strategy="mirrored", replicas=count)
        ring = estimate(setup, workload, hardware).communication_s
        ratios.append(estimate(setup, slow, hardware).communication_s / ring)
    assert 1 <= ratios[0] < ratios[1]


def test_replicas_without_examples_are_refused(workload):
    small = dataclasses.replace(workload, global_batch_size=2)
    found = estimate(Setup(strategy="mirrored", replicas=4), small, load_hardware("a100"))
    assert found.refusal == "a batch of 2 has no example for every replica"


def test_one_device_is_recommended_for_a_small_batch(workload):
    small = dataclasses.replace(workload, global_batch_size=8)
    hardware = load_hardware("h100")
    setups = list_setups(hardware, small, workers=2, devices=8)
    found = recommend(estimate_all(setups, small, hardware), batch=8)
    assert found.best.setup.name == "one_device"
    assert found.reason.startswith("One device is enough")
    assert found.limit.startswith("Do not use more: 2 devices")


def test_a_placement_is_recommended_only_for_what_does_not_fit_otherwise(workload):
    hardware = load_hardware("a100")
    hardware = dataclasses.replace(hardware, process_bytes=0.0)
    large = dataclasses.replace(workload, global_batch_size=1)
    one = dataclasses.replace(
        large, layers=tuple(dataclasses.replace(x, activations=1e9) for x in large.layers)
    )
    setups = list_setups(hardware, one, workers=1, devices=8)
    needed = estimate(ONE, one, hardware).memory.total
    small = dataclasses.replace(hardware, memory_bytes=needed)  # of which nine tenths count
    found = recommend(estimate_all(setups, one, small), batch=1)
    assert found.best.setup.placement != "none"
    tiny = dataclasses.replace(hardware, memory_bytes=1e6)
    nothing = recommend(estimate_all(setups, one, tiny), batch=1)
    assert nothing.best is None
    assert nothing.reason.startswith("Nothing fits")


def test_a_growing_batch_keeps_each_replicas_part(workload):
    hardware = load_hardware("k80")
    setups = [Setup(strategy="mirrored", replicas=n) for n in (2, 8)]
    two, eight = estimate_all(setups, workload, hardware, batch_per_replica=32)
    assert two.computation_s == pytest.approx(eight.computation_s)
    assert eight.examples_per_s > 2 * two.examples_per_s


def test_the_price_of_an_epoch(workload):
    hardware = load_hardware("a100")
    setup = Setup(strategy="mirrored", replicas=2)
    found = estimate(setup, workload, hardware, price_per_hour=3.0)
    assert found.epoch_s == pytest.approx(10_000 / found.examples_per_s)
    assert found.price == pytest.approx(2 * 3.0 * found.epoch_s / 3600)
