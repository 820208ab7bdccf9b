"""Where the parts of a model are computed: stages, the devices they run on, and their variables."""

from tfdist.placement.options import Layers, Placement, Shards, Strips

__all__ = ["Layers", "Placement", "Shards", "Strips"]
