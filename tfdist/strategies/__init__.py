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
        "CentralStorage": "tfdist.strategies.central_storage:CentralStorage",
        "LocalSgd": "tfdist.strategies.local_sgd:LocalSgd",
        "Mirrored": "tfdist.strategies.mirrored:Mirrored",
        "MultiWorkerMirrored": "tfdist.strategies.multi_worker_mirrored:MultiWorkerMirrored",
        "OneDevice": "tfdist.strategies.one_device:OneDevice",
        "ParameterServer": "tfdist.strategies.parameter_server:ParameterServer",
        "Strategy": "tfdist.strategies.base:Strategy",
        "Tpu": "tfdist.strategies.tpu:Tpu",
        "Traits": "tfdist.strategies.base:Traits",
        "LocalSgdStrategy": "tfdist.strategies.local_sgd_strategy:LocalSgdStrategy",
        "STRATEGIES": "tfdist.strategies.registry:STRATEGIES",
        "make_central_storage": "tfdist.strategies.central_storage:make_central_storage",
        "make_local_sgd": "tfdist.strategies.local_sgd:make_local_sgd",
        "make_mirrored": "tfdist.strategies.mirrored:make_mirrored",
        "make_multi_worker_mirrored": (
            "tfdist.strategies.multi_worker_mirrored:make_multi_worker_mirrored"
        ),
        "make_one_device": "tfdist.strategies.one_device:make_one_device",
        "make_parameter_server": "tfdist.strategies.parameter_server:make_parameter_server",
        "make_strategy": "tfdist.strategies.registry:make_strategy",
        "make_tpu": "tfdist.strategies.tpu:make_tpu",
        "run_server": "tfdist.strategies.servers:run_server",
    },
)
