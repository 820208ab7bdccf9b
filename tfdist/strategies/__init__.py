"""The strategies, a thin factory for each, and the table of them."""

from tfdist._lazy import lazy_exports

__all__ = [
    "STRATEGIES",
    "CentralStorage",
    "LocalSgd",
    "LocalSgdStrategy",
    "Mirrored",
    "MultiWorkerMirrored",
    "OneDevice",
    "ParameterServer",
    "Strategy",
    "Tpu",
    "Traits",
    "make_central_storage",
    "make_local_sgd",
    "make_mirrored",
    "make_multi_worker_mirrored",
    "make_one_device",
    "make_parameter_server",
    "make_strategy",
    "make_tpu",
    "run_server",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "CentralStorage": "tfdist.strategies.builtin.central_storage:CentralStorage",
        "LocalSgd": "tfdist.strategies.builtin.local_sgd:LocalSgd",
        "Mirrored": "tfdist.strategies.builtin.mirrored:Mirrored",
        "MultiWorkerMirrored": (
            "tfdist.strategies.builtin.multi_worker_mirrored:MultiWorkerMirrored"
        ),
        "OneDevice": "tfdist.strategies.builtin.one_device:OneDevice",
        "ParameterServer": "tfdist.strategies.builtin.parameter_server:ParameterServer",
        "Strategy": "tfdist.strategies.base:Strategy",
        "Tpu": "tfdist.strategies.builtin.tpu:Tpu",
        "Traits": "tfdist.strategies.base:Traits",
        "LocalSgdStrategy": "tfdist.strategies.local_sgd_strategy:LocalSgdStrategy",
        "STRATEGIES": "tfdist.strategies.registry:STRATEGIES",
        "make_central_storage": "tfdist.strategies.builtin.central_storage:make_central_storage",
        "make_local_sgd": "tfdist.strategies.builtin.local_sgd:make_local_sgd",
        "make_mirrored": "tfdist.strategies.builtin.mirrored:make_mirrored",
        "make_multi_worker_mirrored": (
            "tfdist.strategies.builtin.multi_worker_mirrored:make_multi_worker_mirrored"
        ),
        "make_one_device": "tfdist.strategies.builtin.one_device:make_one_device",
        "make_parameter_server": "tfdist.strategies.builtin.parameter_server:make_parameter_server",
        "make_strategy": "tfdist.strategies.registry:make_strategy",
        "make_tpu": "tfdist.strategies.builtin.tpu:make_tpu",
        "run_server": "tfdist.strategies.servers:run_server",
    },
)
