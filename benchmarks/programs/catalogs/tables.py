"""Examples that train on tables and time series."""

import json
import random
from pathlib import Path

import numpy as np

from benchmarks.programs import made
from benchmarks.programs.adapters import Program

_STRUCTURED = "examples/keras_io/structured_data"
_TF_STRUCTURED = "examples/keras_io/tensorflow/structured_data"
_SERIES = "examples/keras_io/timeseries"
_TF_SERIES = "examples/keras_io/tensorflow/timeseries"
_CENSUS = ("pandas",)


def _write_ratings(directory: Path) -> None:
    rng = random.Random(0)
    root = directory / "ml-latest-small"
    rows = [f"{rng.randint(1, 12)},{rng.randint(1, 20)},{rng.randint(1, 5)},0" for _ in range(150)]
    made.write_lines(root / "ratings.csv", ["userId,movieId,rating,timestamp", *rows])
    movies = [f"{index},Film {index},Drama" for index in range(1, 21)]
    made.write_lines(root / "movies.csv", ["movieId,title,genres", *movies])


def _write_movielens(directory: Path) -> None:
    rng = random.Random(0)
    root = directory / "ml-1m"
    users = [f"{index}::F::25::{index % 3}::100{index}" for index in range(1, 13)]
    made.write_lines(root / "users.dat", users)
    rows = [
        f"{rng.randint(1, 12)}::{rng.randint(1, 20)}::{rng.randint(1, 5)}::{time}"
        for time in range(300)
    ]
    made.write_lines(root / "ratings.dat", rows)
    movies = [f"{index}::Film {index}::Drama|Comedy" for index in range(1, 21)]
    made.write_lines(root / "movies.dat", movies)


def _write_census(directory: Path) -> None:
    made.write_census(directory, rows=100)


def _write_heart(directory: Path) -> None:
    made.write_heart(directory / "heart.csv", rows=100)


def _write_cards(directory: Path) -> None:
    rng = np.random.default_rng(0)
    lines = ["a,b,c,d,class"]
    for index in range(200):
        values = ",".join(f"{value:.4f}" for value in rng.normal(size=4) + (index % 5 == 0))
        lines.append(f'{values},"{int(index % 5 == 0)}"')
    made.write_lines(directory / "creditcard.csv", lines)


def _write_brain_waves(directory: Path) -> None:
    import csv

    rng = np.random.default_rng(0)
    header = [
        "", "label", "raw_values", "signal_quality", "indra_time", "browser_latency",
        "reading_time", "attention_esense", "meditation_esense", "updatedAt", "createdAt",
    ]  # fmt: skip
    kinds = ("blink1", "blink2", "math1", "math5", "video-ver1", "colorRound1-1")
    with (directory / "eeg-data.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for index in range(90):
            values = json.dumps(rng.integers(-200, 200, 512).tolist())
            writer.writerow([index, kinds[index % len(kinds)], values, 0, *[0] * 7])


def _write_traffic(directory: Path) -> None:
    rng = np.random.default_rng(0)
    distances = rng.uniform(0, 6000, (228, 228))
    np.savetxt(directory / "PeMSD7_W_228.csv", distances + distances.T, delimiter=",", fmt="%.1f")
    speeds = (
        50 + 10 * np.sin(np.arange(150)[:, None] / 9 + np.arange(228)) + rng.normal(size=(150, 228))
    )
    np.savetxt(directory / "PeMSD7_V_228.csv", speeds, delimiter=",", fmt="%.3f")


def _write_daily(directory: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("art_daily_small_noise.csv", "art_daily_jumpsup.csv"):
        values = 20 + 5 * np.sin(np.arange(130) / 8) + rng.normal(size=130)
        lines = [f"2014-04-01 {i // 60:02}:{i % 60:02}:00,{v:.5f}" for i, v in enumerate(values)]
        made.write_lines(directory / name, ["timestamp,value", *lines])


def _write_engines(directory: Path) -> None:
    rng = np.random.default_rng(0)
    for name, count in (("FordA_TRAIN.tsv", 70), ("FordA_TEST.tsv", 30)):
        labels = np.where(np.arange(count) % 2, 1, -1)
        waves = np.sin(np.arange(40) * (0.3 + 0.1 * labels[:, None])) + rng.normal(size=(count, 40))
        np.savetxt(directory / name, np.c_[labels, waves], delimiter="\t")


def _write_climate(directory: Path) -> None:
    rng = np.random.default_rng(0)
    keys = [
        "p (mbar)", "T (degC)", "Tpot (K)", "Tdew (degC)", "rh (%)", "VPmax (mbar)",
        "VPact (mbar)", "VPdef (mbar)", "sh (g/kg)", "H2OC (mmol/mol)", "rho (g/m**3)",
        "wv (m/s)", "max. wv (m/s)", "wd (deg)",
    ]  # fmt: skip
    lines = ["Date Time," + ",".join(keys)]
    for index in range(600):
        values = rng.normal(size=14) + np.sin(index / 20)
        lines.append(f"01.01.2009 {index}," + ",".join(f"{value:.4f}" for value in values))
    made.write_lines(directory / "jena_climate_2009_2016.csv", lines)


PROGRAMS = (
    Program(
        name="collaborative_filtering_movielens",
        path=f"{_STRUCTURED}/collaborative_filtering_movielens.py",
        constants={"EMBEDDING_SIZE": 8},
        files=_write_ratings,
        needs=_CENSUS,
    ),
    Program(
        name="deep_neural_decision_forests",
        path=f"{_STRUCTURED}/deep_neural_decision_forests.py",
        constants={"num_trees": 3, "depth": 4, "batch_size": 32},
        # Keras passes an OrderedDict to the inputs in the order of the dictionary.
        replace={
            ".map(encode_categorical)": ".map(encode_categorical)"
            ".map(lambda x, y: ({name: x[name] for name in FEATURE_NAMES}, y))"
        },
        files=_write_census,
        needs=_CENSUS,
    ),
    Program(
        name="tabtransformer",
        path=f"{_STRUCTURED}/tabtransformer.py",
        constants={"BATCH_SIZE": 32, "NUM_TRANSFORMER_BLOCKS": 1},
        # The example uses `tf` without importing it, and Keras passes an OrderedDict to the inputs
        # in the order of the dictionary.
        replace={
            "tf.data.": "tf_data.",
            ".map(encode_categorical)": ".map(encode_categorical)"
            ".map(lambda x, y, w: ({name: x[name] for name in FEATURE_NAMES}, y, w))",
        },
        files=_write_census,
        needs=_CENSUS,
    ),
    Program(
        name="imbalanced_classification",
        path=f"{_TF_STRUCTURED}/imbalanced_classification.py",
        constants={"fname": "creditcard.csv"},
        replace={"batch_size=2048": "batch_size=64"},
        files=_write_cards,
    ),
    Program(
        name="movielens_recommendations_transformers",
        path=f"{_TF_STRUCTURED}/movielens_recommendations_transformers.py",
        # Keras passes an OrderedDict to the inputs in the order of the dictionary.
        replace={
            "batch_size=265": "batch_size=32",
            ".map(process)": ".map(process).map(lambda x, y: ({**x}, y))",
        },
        instead={"urlretrieve(": "", "ZipFile(": ""},
        files=_write_movielens,
        needs=_CENSUS,
    ),
    Program(
        name="structured_data_classification_from_scratch",
        path=f"{_TF_STRUCTURED}/structured_data_classification_from_scratch.py",
        files=_write_heart,
        needs=_CENSUS,
    ),
    Program(
        name="structured_data_classification_with_feature_space",
        path=f"{_TF_STRUCTURED}/structured_data_classification_with_feature_space.py",
        files=_write_heart,
        needs=_CENSUS,
    ),
    Program(
        name="eeg_signal_classification",
        path=f"{_TF_SERIES}/eeg_signal_classification.py",
        constants={"BATCH_SIZE": 16},
        files=_write_brain_waves,
        needs=("pandas", "sklearn"),
        stop_before="def view_evaluated_eeg_plots",
    ),
    Program(
        name="timeseries_traffic_forecasting",
        path=f"{_TF_SERIES}/timeseries_traffic_forecasting.py",
        constants={"lstm_units": 16, "batch_size": 16},
        files=_write_traffic,
        needs=_CENSUS,
    ),
    Program(
        name="timeseries_anomaly_detection",
        path=f"{_SERIES}/timeseries_anomaly_detection.py",
        constants={"TIME_STEPS": 32},
        replace={"batch_size=128": "batch_size=32"},
        files=_write_daily,
        needs=_CENSUS,
    ),
    Program(
        name="timeseries_classification_from_scratch",
        path=f"{_SERIES}/timeseries_classification_from_scratch.py",
        constants={"batch_size": 16},
        files=_write_engines,
    ),
    Program(
        name="timeseries_classification_transformer",
        path=f"{_SERIES}/timeseries_classification_transformer.py",
        replace={"batch_size=64": "batch_size=16", "head_size=256": "head_size=16"},
        files=_write_engines,
    ),
    Program(
        name="timeseries_weather_forecasting",
        path=f"{_SERIES}/timeseries_weather_forecasting.py",
        constants={"past": 60, "future": 6, "batch_size": 32},
        instead={
            "zip_file = ZipFile": "",
            "zip_file.extractall": "",
            "show_raw_visualization(df)": "",
        },
        files=_write_climate,
        needs=_CENSUS,
    ),
)
