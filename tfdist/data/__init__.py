"""Sources of examples, and global batches that are a pure function of (seed, step)."""

from tfdist._lazy import lazy_exports

_EXPORTS = {
    "ArraySource": "tfdist.data.source:ArraySource",
    "BatchSource": "tfdist.data.source:BatchSource",
    "SequentialSource": "tfdist.data.source:SequentialSource",
    "Source": "tfdist.data.source:Source",
    "as_user_error": "tfdist.data.graph_errors:as_user_error",
    "cache_source": "tfdist.data.cache:cache_source",
    "describe_difference": "tfdist.data.fingerprint:describe_difference",
    "make_eval_dataset": "tfdist.data.pipeline:make_eval_dataset",
    "make_train_dataset": "tfdist.data.pipeline:make_train_dataset",
    "split_batches": "tfdist.data.rows:split_batches",
    "split_rows": "tfdist.data.rows:split_rows",
    "steps_per_epoch": "tfdist.data.pipeline:steps_per_epoch",
}

__all__ = list(_EXPORTS)

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
