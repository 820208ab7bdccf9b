"""The columns of the table: how a program is started in each of them."""

# The flags of `python -m tfdist.run`. With one step in flight, servers give one device's result.
STRATEGIES = {
    "one": ("--strategy=one_device",),
    "mirrored2": ("--strategy=mirrored", "--virtual_devices=2"),
    "mirrored3": ("--strategy=mirrored", "--virtual_devices=3"),
    "central2": ("--strategy=central_storage", "--virtual_devices=2"),
    "workers2": ("--workers=2",),
    "servers": ("--workers=1", "--ps=1", "--max_in_flight=1"),
}
# Keras alone: unchanged, and three times with weights that are perturbed by their rounding.
KERAS, MOVED = "keras", ("moved1", "moved2", "moved3")
