"""Makes TensorFlow's distributed variables ordinary variables outside of steps.

A variable that is created in a strategy's scope has a copy on each replica. Within a step, it is
the replica's copy. Outside of all steps, TensorFlow's class supports only a part of what
`tf.Variable` does: no `float(v)`, a `bool(v)` that is always true, no handle for
`tf.GradientTape.gradient`, no update by an optimizer, and sums that an assignment divides over the
replicas, where integers are cut. What is missing is added here, by the rule: **a read sees the
variable's value, and a write reaches all copies.**

What TensorFlow supports stays as it is, so the additions remain for the rest of the process.

A handle is that of one copy, and nobody notices what `tf.raw_ops` write through it. So the copies
whose handles a program has asked for are copied to the others before each step.
"""

import functools
import operator
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfdist.graphs import list_operations
from tfdist.internals import (
    AggregatingVariable,
    CollectiveAllReduceExtended,
    DistributedDelegate,
    DistributedVariable,
    LoadedFunction,
    MirroredExtended,
    MirroredVariable,
    SyncOnReadVariable,
    cross_device_ops,
    merge_call_interim,
    slice_variable,
    values_util,
)
from tfdist.replacing import replace_always

if TYPE_CHECKING:
    import numpy as np

_IS_SHARED = "_tfdist_is_shared"
_COPY = "_tfdist_copy"  # the copy whose handle the program has
_LIBRARIES = "keras.", "tensorflow.", "tfdist."  # they write by methods of variables
# Of `tf.Variable`, in addition to what `DistributedVariable` defines.
_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "__float__": float,
    "__int__": int,
    "__complex__": complex,
    "__index__": operator.index,
}
_WRITES = (
    *("_strided_slice_assign", "batch_scatter_update", "count_up_to", "scatter_nd_add"),
    *("scatter_nd_max", "scatter_nd_min", "scatter_nd_sub", "scatter_nd_update"),
)
_SCATTERS = tuple(
    f"scatter_{kind}" for kind in ("add", "sub", "mul", "div", "min", "max", "update")
)
# The variables whose handles the program has asked for, by their ids, because they have no hash.
_with_handles: dict[int, weakref.ref[Any]] = {}


def make_variables_ordinary() -> None:
    """Adds to distributed variables what they lack outside of steps. Further calls do nothing."""
    if "__float__" in vars(DistributedDelegate):
        return
    for name, convert in _NUMBERS.items():
        replace_always(DistributedDelegate, name, _convert(convert))
    replace_always(DistributedDelegate, "__array__", _to_array)
    replace_always(DistributedVariable, "__bool__", _convert(bool))
    _mend_destinations()
    for kind in (DistributedVariable, AggregatingVariable):
        replace_always(kind, "__reduce__", _reduce_to_value)
    replace_always(DistributedVariable, "__copy__", lambda variable: variable)
    replace_always(
        DistributedVariable, "handle", property(_make_handle(DistributedVariable.handle.fget))
    )
    replace_always(
        DistributedVariable, "__getitem__", _make_getitem(DistributedDelegate.__getitem__)
    )
    for name in ("sparse_read", "gather_nd"):
        read = getattr(DistributedVariable, name)
        replace_always(DistributedVariable, name, _read_by(name, read))
    for name in _WRITES:
        write = getattr(DistributedVariable, name, None)
        replace_always(DistributedVariable, name, _write_all(name, write))
    for name in ("scatter_min", "scatter_max", "scatter_update"):
        # Replicas could not agree on such updates. Outside of a step, there is only one.
        replace_always(MirroredVariable, name, _write_all(name, vars(MirroredVariable)[name]))
    _mend_sums()
    _mend_optimizers()
    replace_always(
        tf.GradientTape, "watched_variables", _make_watched(tf.GradientTape.watched_variables)
    )
    replace_always(LoadedFunction, "_call_flat", _make_call(LoadedFunction._call_flat))


def spread_raw_writes() -> None:
    """Makes the copies of variables equal to the one whose handle the program has."""
    for reference in list(_with_handles.values()):
        variable = reference()
        if variable is not None:
            copy = vars(variable)[_COPY]
            for other in variable.values:
                if other is not copy:
                    values_util.assign_on_device(other.device, other, copy.read_value())


def _is_outside() -> bool:
    """Returns whether the caller is in no step of a replica, and in no update of a copy."""
    return values_util.get_current_replica_id_as_int() is None or not tf.distribute.has_strategy()


def _convert(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda values: convert(values._get())


def _to_array(
    values: tf.Variable, dtype: "np.dtype | None" = None, copy: bool | None = None
) -> Any:
    array = values._get().numpy()
    return keras.ops.convert_to_numpy(array).astype(dtype or array.dtype, copy=bool(copy))


def _mend_destinations() -> None:
    """Makes TensorFlow test a variable for None where it tests its truth value."""
    broadcast, check = MirroredExtended._broadcast_to, cross_device_ops.check_destinations

    @functools.wraps(broadcast)
    def broadcast_to(
        extended: tf.distribute.StrategyExtended,
        tensor: tf.Tensor,
        destinations: tf.distribute.DistributedValues | str,
    ) -> Any:
        if isinstance(destinations, DistributedVariable) and tf.is_tensor(tensor):
            return extended._get_cross_device_ops(tensor).broadcast(tensor, destinations)
        return broadcast(extended, tensor, destinations)

    @functools.wraps(check)
    def check_destinations(destinations: tf.distribute.DistributedValues | str) -> bool:
        return isinstance(destinations, DistributedVariable) or check(destinations)

    replace_always(MirroredExtended, "_broadcast_to", broadcast_to)
    replace_always(cross_device_ops, "check_destinations", check_destinations)


def _reduce_to_value(variable: tf.Variable) -> Any:
    """Pickles a variable as `tf.Variable` does: by its value."""
    options = {"trainable": variable.trainable, "name": variable._shared_name}
    return functools.partial(tf.Variable, variable.numpy(), **options), ()


def _make_handle(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def handle(variable: tf.Variable) -> Any:
        is_sum = isinstance(variable, SyncOnReadVariable)  # the handle of a part would be wrong
        if not is_sum and _is_outside():
            copy = variable._get_on_device_or_primary()
            if not _is_read_by_library():
                key = id(variable)
                vars(variable)[_COPY] = copy
                _with_handles[key] = weakref.ref(variable, lambda _: _with_handles.pop(key, None))
            return copy.handle
        return original(variable)

    return handle


def _is_read_by_library() -> bool:
    """Returns whether Keras or TensorFlow reads a handle, rather than the user's own code."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_name == "handle" and frame.f_back:  # of `keras.Variable`
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").startswith(_LIBRARIES)


def _make_getitem(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def getitem(variable: tf.Variable, spec: object) -> Any:
        if _is_outside():
            return slice_variable(variable, spec)  # can be assigned to
        return original(variable, spec)

    return getitem


def _read_by(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(variable: tf.Variable, indices: tf.Tensor, name: str | None = None) -> Any:
        if not _is_outside():
            return original(variable, indices, name=name)
        if isinstance(variable, SyncOnReadVariable):
            function = tf.gather if method == "sparse_read" else tf.gather_nd
            return function(variable.value(), indices, name=name)
        return getattr(variable._get_on_device_or_primary(), method)(indices, name=name)

    return read


def _write_all(name: str, original: Callable[..., Any] | None) -> Callable[..., Any]:
    """Returns a method that updates every copy, outside of steps."""

    def write(variable: tf.Variable, *args: Any, **kwargs: Any) -> Any:
        if values_util.is_saving_non_distributed():
            return getattr(variable._primary, name)(*args, **kwargs)
        if not _is_outside():
            if original is None:
                return getattr(variable._get(), name)(*args, **kwargs)
            return original(variable, *args, **kwargs)
        if isinstance(variable, SyncOnReadVariable):
            return _write_sum(variable, name, args, kwargs)

        def update(copy: tf.Variable) -> Any:
            return getattr(copy, name)(*args, **kwargs)

        return variable.distribute_strategy.extended.update(variable, update)

    return functools.wraps(original)(write) if original else write


def _mend_sums() -> None:
    """Makes variables that are summed over the replicas keep the value that a script assigns.

    TensorFlow divides it by the number of replicas. Here, the first copy gets all of it.

    A variable that no step has updated is the worker's own: each worker of a cluster computes the
    same by itself, so nothing is added, and no worker waits for another.
    """
    original_restore = values_util.get_on_read_restore_ops

    @functools.wraps(original_restore)
    def restore(variable: tf.Variable, value: tf.Tensor, aggregation: Any) -> Any:
        if aggregation != tf.VariableAggregation.SUM:
            return original_restore(variable, value, aggregation)
        return _assign_sum(variable, value, read_value=False)

    def make_assign(original: Callable[..., Any], sign: int) -> Callable[..., Any]:
        @functools.wraps(original)
        def assign(variable: tf.Variable, value: tf.Tensor, read_value: bool = True) -> Any:
            if variable.aggregation != tf.VariableAggregation.SUM:
                return original(variable, value, read_value=read_value)
            value = tf.cast(value, variable.dtype)
            if sign:
                value = variable.value() + value if sign > 0 else variable.value() - value
            return _assign_sum(variable, value, read_value=read_value)

        return assign

    for name, sign in (("assign", 0), ("assign_add", 1), ("assign_sub", -1)):
        name = f"on_read_{name}_cross_replica"
        replace_always(values_util, name, make_assign(getattr(values_util, name), sign))
    replace_always(values_util, "get_on_read_restore_ops", restore)
    for name in _SCATTERS:
        replace_always(SyncOnReadVariable, name, _write_all(name, vars(SyncOnReadVariable)[name]))
    replace_always(SyncOnReadVariable, "__init__", _make_init(SyncOnReadVariable.__init__))
    replace_always(
        SyncOnReadVariable,
        "_update_replica",
        _make_update_replica(SyncOnReadVariable._update_replica),
    )
    replace_always(
        SyncOnReadVariable, "_get_cross_replica", _make_get(SyncOnReadVariable._get_cross_replica)
    )
    initial_value = CollectiveAllReduceExtended._get_variable_creator_initial_value
    replace_always(
        CollectiveAllReduceExtended, initial_value.__name__, _make_initial_value(initial_value)
    )


def _assign_sum(variable: tf.Variable, value: tf.Tensor, *, read_value: bool) -> Any:
    value = tf.cast(value, variable.dtype)
    parts = [value if _counts(variable) else tf.zeros_like(value)]
    parts += [tf.zeros_like(value)] * (len(variable.values) - 1)
    pairs = zip(variable.values, parts, strict=True)
    done = [values_util.assign_on_device(copy.device, copy, part) for copy, part in pairs]
    if tf.executing_eagerly():
        return variable if read_value else None
    update = tf.group(*done)
    if not read_value:
        return update
    with tf.control_dependencies([update]):
        return variable.read_value()


def _write_sum(
    variable: tf.Variable, name: str, args: Sequence[object], kwargs: dict[str, Any]
) -> Any:
    """Updates a part of a sum: the first copy gets the value, and is updated."""
    assigned = _assign_sum(variable, variable.read_value(), read_value=False)
    if _counts(variable):
        with tf.control_dependencies([] if assigned is None else [assigned]):
            getattr(variable.values[0], name)(*args, **kwargs)
    return variable


def _counts(variable: tf.Variable) -> bool:
    """Returns whether this process's part of a sum is not zero after an assignment."""
    return not _is_shared(variable) or _is_first_worker(variable)


def _is_shared(variable: tf.Variable) -> bool:
    return _IS_SHARED in vars(variable)  # `getattr` would read the variable


def _has_workers(variable: tf.Variable) -> bool:
    extended = variable.distribute_strategy.extended
    return isinstance(extended, CollectiveAllReduceExtended) and extended._num_workers > 1


def _is_first_worker(variable: tf.Variable) -> bool:
    return not _has_workers(variable) or variable.distribute_strategy.extended._id_in_cluster == 0


def _make_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(variable: tf.Variable, *args: Any, **kwargs: Any) -> None:
        original(variable, *args, **kwargs)
        if variable.aggregation == tf.VariableAggregation.SUM and tf.executing_eagerly():
            for copy in variable.values[1:]:  # the initial value counts once
                copy.assign(tf.zeros_like(copy))

    return init


def _make_update_replica(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update_replica(variable: tf.Variable, *args: Any, **kwargs: Any) -> Any:
        if not _is_shared(variable):
            vars(variable)[_IS_SHARED] = True
            is_sum = variable.aggregation == tf.VariableAggregation.SUM
            if is_sum and not _is_first_worker(variable):
                with tf.init_scope():
                    for copy in variable.values:
                        copy.assign(tf.zeros_like(copy))
        return original(variable, *args, **kwargs)

    return update_replica


def _make_get(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def get_cross_replica(variable: tf.Variable) -> Any:
        is_sum = variable.aggregation == tf.VariableAggregation.SUM
        is_own = _has_workers(variable) and not _is_shared(variable)
        can_add = variable.dtype.is_floating or variable.dtype.is_integer
        if is_sum and (is_own or not (can_add or variable.dtype.is_complex)):
            return tf.identity(variable.values[0])  # the others are zero
        return original(variable)

    return get_cross_replica


def _make_initial_value(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initial_value(
        extended: tf.distribute.StrategyExtended, replica_id: int, **kwargs: Any
    ) -> Any:
        """Returns the initial value of a copy, without waiting for other workers for sums."""
        is_on_read = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        if replica_id == 0 and is_on_read:
            return kwargs["initial_value"]
        return original(extended, replica_id=replica_id, **kwargs)

    return initial_value


def _mend_optimizers() -> None:
    """Makes Keras's optimizers update all copies when a script applies gradients."""
    merge_call = merge_call_interim.maybe_merge_call

    def maybe_merge_call(
        fn: Callable[..., Any], strategy: tf.distribute.Strategy, *args: Any, **kwargs: Any
    ) -> Any:
        if tf.distribute.in_cross_replica_context():
            return fn(strategy, *args, **kwargs)
        return merge_call(fn, strategy, *args, **kwargs)

    replace_always(tf.__internal__.distribute.interim, "maybe_merge_call", maybe_merge_call)
    apply_scaled = keras.optimizers.LossScaleOptimizer._tf_apply

    @functools.wraps(apply_scaled)
    def apply(
        optimizer: keras.Optimizer,
        grads: Sequence[tf.Tensor | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        if tf.distribute.in_cross_replica_context():
            optimizer._common_apply(grads, trainable_variables)
        else:
            apply_scaled(optimizer, grads, trainable_variables)

    replace_always(keras.optimizers.LossScaleOptimizer, "_tf_apply", apply)


def _make_watched(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes a tape return the variables that it watched, instead of their copies."""

    @functools.wraps(original)
    def watched_variables(tape: tf.GradientTape) -> Any:
        found = original(tape)
        if not _is_outside():
            return found
        return tuple({id(whole): whole for whole in map(_find_whole, found)}.values())

    return watched_variables


def _find_whole(variable: tf.Variable) -> Any:
    """Returns the distributed variable that a variable is a copy of, or else the variable."""
    for holder in variable, variable.handle:
        if hasattr(holder, "_distributed_container"):
            whole = holder._distributed_container()
            return variable if whole is None else whole
    return variable


def _make_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of a SavedModel that was loaded in a scope work outside of steps, too."""

    @functools.wraps(original)
    def call(function: Any, args: Sequence[object], captured_inputs: Sequence[tf.Tensor]) -> Any:
        variables = [v for v in captured_inputs if isinstance(v, DistributedVariable)]
        if not variables or not tf.distribute.in_cross_replica_context():
            return original(function, args, captured_inputs)
        handles = [v.handle if isinstance(v, DistributedVariable) else v for v in captured_inputs]
        found = super(LoadedFunction, function)._call_flat(args, handles)
        if _writes(function):
            for variable in variables:
                for copy in variable.values[1:]:
                    copy.assign(variable.values[0])
        return found

    return call


def _writes(function: Any) -> bool:
    """Returns whether a function updates a variable."""
    updates = re.compile("Assign|Resource(Apply|Scatter|SparseApply|Strided)")
    return any(updates.match(node.op) for node in list_operations(function.graph))
