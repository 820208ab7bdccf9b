"""Trains random Keras programs with Keras and with tfdist in every way, and compares the results.

    python -m benchmarks.random_programs [--first=N] [--count=100] [--minutes=30] [--ways=a,b]

Prints each program that ends otherwise, reduced to what matters of it, and a table. The exit status
is 1 if there is one.
"""

import argparse
import collections
import gc
import os
import random
import sys
import time
from collections.abc import Mapping

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf

from tests.random_programs.comparison import (
    DIFFERS,
    EQUAL,
    NO_PROGRAM,
    NOT_COMPARED,
    REFUSED,
    WAYS,
    compare,
    reduce,
)
from tests.random_programs.program import make_program

DEVICES = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--count", type=int, default=100, help="programs (default: 100)")
    parser.add_argument("--minutes", type=float, default=30, help="starts no program after this")
    parser.add_argument("--ways", default=",".join(WAYS), help="of training (default: all)")
    flags = parser.parse_args()
    _configure()
    ways = flags.ways.split(",")
    began = time.monotonic()
    counts: dict[str, collections.Counter[str]] = {way: collections.Counter() for way in ways}
    refusals: collections.Counter[str] = collections.Counter()
    for seed in range(flags.first, flags.first + flags.count):
        if time.monotonic() - began > 60 * flags.minutes:
            break
        gc.collect()
        print(f"{seed}: {_list_choices(make_program(seed).choices)}", flush=True)
        for way in ways:
            outcome = compare(seed, way)
            counts[way][outcome.kind] += 1
            if outcome.kind == REFUSED:
                refusals[outcome.text.partition(":")[0]] += 1
            if outcome.kind == DIFFERS:
                print(f"  {way}: {outcome.text}", flush=True)
                print(f"    because of: {_list_choices(reduce(seed, way))}", flush=True)
            if outcome.kind == NO_PROGRAM:
                print(f"  Keras: {outcome.text}", flush=True)
                break
    _print_table(counts)
    for text, count in refusals.most_common():
        print(f"{count} refused: {text}")
    print(f"{time.monotonic() - began:.0f} s, from seed {flags.first}")
    return int(any(found[DIFFERS] for found in counts.values()))


def _configure() -> None:
    """Sets up what the tests set up: virtual devices, and float64."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES
    )
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


def _list_choices(choices: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={chosen}" for name, chosen in choices.items()) or "nothing special"


def _print_table(counts: dict[str, collections.Counter[str]]) -> None:
    kinds = (EQUAL, REFUSED, DIFFERS, NOT_COMPARED)
    print(f"| | {' | '.join(kinds)} |")
    print("|---" * (len(kinds) + 1) + "|")
    for way, found in counts.items():
        print(f"| {way} | {' | '.join(str(found[kind]) for kind in kinds)} |")


if __name__ == "__main__":
    sys.exit(main())
