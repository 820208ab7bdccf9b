"""Finds what is wrong with a machine or a cluster, and why more devices are not faster."""

from tfdist._lazy import lazy_exports

__all__ = ["Finding", "Machine", "examine"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Finding": "tfdist.doctor.findings:Finding",
        "Machine": "tfdist.doctor.machine:Machine",
        "examine": "tfdist.doctor.table:examine",
    },
)
