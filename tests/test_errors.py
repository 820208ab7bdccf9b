"""Bad input costs one line and leaves nothing: the table in docs/errors.md, made by these tests.

`make errors` writes the table anew.
"""

import contextlib
import os
import pathlib
import re
import shlex
import shutil

import numpy as np
import pytest
import tensorflow as tf

from tests import zoo
from tfdist.cli.command import run_command
from tfdist.doctor import __main__ as doctor
from tfdist.jobs import __main__ as jobs
from tfdist.launch import __main__ as launch
from tfdist.plan import __main__ as plan
from tfdist.records.run_lock import hold_run_lock
from tfdist.report import __main__ as report
from tfdist.runs.options import TrainOptions
from tfdist.serve import __main__ as serve
from tfdist.tasks.commands import ExportOptions
from tfdist.tasks.segmentation.inference.commands import (
    EXPORT,
    run_evaluation,
    run_prediction,
)
from tfdist.tasks.segmentation.inference.options import EvaluateOptions, PredictOptions
from tfdist.train import run_training
from tfdist.verify.__main__ import run_verification
from tfdist.verify.options import VerifyOptions

DOCS = pathlib.Path(__file__).parents[1] / "docs" / "errors.md"
SMALL = [
    "--dataset=shapes",
    "--image_size=16,16",
    "--train_examples=40",
    "--val_examples=10",
    "--base_filters=4",
    "--depth=2",
    "--global_batch_size=8",
    "--quiet",
]
TWO = "--strategy=mirrored --devices=CPU:0,CPU:1"
FOLDER = "--dataset=folder --data_dir=data --num_classes=3"

# Group -> the flags that are wrong.
TRAIN = {
    "Flags": [
        "--stratgy=mirrored",
        "--epochs=ten",
        "mirrored",
        "--image_size=64",
        "--image_size=a,b",
        "--flagfile=none.txt",
        "--checkpoint_every=soon",
        "--epochs=0",
        "--max_steps=-1",
        "--global_batch_size=0",
        "--global_batch_size=all",
        "--micro_batches=0",
        "--steps_per_loop=0",
        "--learning_rate=-1",
        "--ema_momentum=1",
        "--keep_checkpoints=0",
        "--grace_period_s=-1",
        "--log_every=-1",
    ],
    "Names": [
        "--strategy=miror",
        "--dataset=shape",
        "--dataset=tfds",
        "--model=umet",
        "--loss=dise",
        "--optimizer=adamm",
        "--precision=bfloat16",
        "--norm=sync",
        "--jit_compile=yes",
        "--class_weights=rare",
        "--cache=ram",
        "--track=tensorboard",
    ],
    "Strategies": [
        "--strategy=mirrored --devices=GPU:3",
        "--strategy=mirrored --devices=CPU:0,CPU:0",
        "--strategy=mirrored --devices=first",
        f"{TWO} --all_reduce=nccl",
        f"{TWO} --global_batch_size=1",
        "--strategy=tpu --tpu=local",
        "--strategy=one_device --all_reduce=hierarchical_copy",
        "--strategy=one_device --bytes_per_pack=1000",
        "--strategy=one_device --compress_gradients",
        "--strategy=one_device --shard_tables_bytes=1000000",
        "--strategy=one_device --sync_every=4",
        "--strategy=local_sgd --sync_every=0",
        "--strategy=local_sgd --outer_momentum=1",
        "--strategy=parameter_server",
        f"{TWO} --global_batch_size=auto --train_examples=1",
        "--strategy=multi_worker_mirrored --global_batch_size=auto",
        "--strategy=tpu --global_batch_size=auto",
        "--strategy=central_storage --parameter_device=GPU:0",
        "--virtual_devices=-1",
    ],
    "Models and training": [
        "--image_size=18,16",
        "--depth=0",
        "--base_filters=0",
        "--pretrained",
        "--scale=2,1",
        "--stored_size=8,8",
        "--stored_size=large",
        "--logit_adjustment=1",
        "--color=1.5",
        "--warmup_steps=-1",
        "--profile=12,10",
        "--profile=10,12 --steps_per_loop=5",
        "--clip_norm=-1",
        "--micro_batches=2",
        f"{TWO} --jit_compile",
        "--norm=group --micro_batches=9",
        "--rematerialize --jit_compile",
    ],
    "Placements": [
        "--stages=head",
        "--placement=layers --mesh=model",
        "--placement=layers --branches=head",
        "--placement=layers --stages=head --branches=head:1",
        "--placement=layers --mesh=model:4",
        "--placement=strips --grid=2",
        "--placement=strips --grid=2,2 --mesh=model:3",
        "--strategy=one_device --placement=layers --jit_compile",
        "--strategy=one_device --placement=layers --mesh=data:2,model:2",
        "--strategy=central_storage --placement=layers",
    ],
    "Data": [
        "--train_examples=0",
        "--dataset=folder --num_classes=3",
        "--dataset=folder --data_dir=data",
        "--dataset=folder --data_dir=nowhere --num_classes=3",
        f"{FOLDER} --num_classes=1",
        f"{FOLDER} --class_names=sky,road",
        f"{FOLDER} --label_map=255",
        f"{FOLDER} --label_map=255:3",
        f"{FOLDER} --label_map=255:1,#ff0000:2",
        "--label_map=255:1",
    ],
    "Run directories": ["--run_dir=/proc/run"],
}


def _encode_png(height, width, value=0, channels=1):
    return tf.io.encode_png(np.full((height, width, channels), value, np.uint8)).numpy()


JPEG = tf.io.encode_jpeg(np.zeros((8, 8, 3), np.uint8)).numpy()
# What is wrong in the data -> the files, besides one good example; None takes one away.
FILES = {
    "no validation split": {"val/images/a.jpg": None, "val/masks/a.png": None},
    "an image without a mask": {"train/masks/a.png": None, "train/masks/b.png": JPEG},
    "a mask without an image": {"train/masks/b.png": _encode_png(8, 8)},
    "two images of one name": {"train/images/a.png": _encode_png(8, 8, channels=3)},
    "a truncated image": {"train/images/a.jpg": JPEG[: len(JPEG) // 2]},
    "an image that is none": {"train/images/a.jpg": b"hello"},
    "an empty image": {"train/images/a.jpg": b""},
    "a mask of another size": {"train/masks/a.png": _encode_png(8, 9)},
    "a mask in colors": {"train/masks/a.png": _encode_png(8, 8, channels=3)},
    "a mask that is none": {"train/masks/a.png": b"hello"},
    "a class out of range": {"train/masks/a.png": _encode_png(8, 8, 7)},
    "a mask of 255": {"train/masks/a.png": _encode_png(8, 8, 255)},
}

# The environment's cluster, wrong.
TF_CONFIG = {
    "not JSON": "{",
    "no task": '{"cluster": {"worker": ["a:1", "b:1"]}}',
    "a task that is not in the cluster": (
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}'
    ),
    "an address twice": (
        '{"cluster": {"worker": ["a:1", "a:1"]}, "task": {"type": "worker", "index": 0}}'
    ),
    "a port out of range": (
        '{"cluster": {"worker": ["a:1", "b:99999"]}, "task": {"type": "worker", "index": 0}}'
    ),
    "no port": '{"cluster": {"worker": ["a", "b:1"]}, "task": {"type": "worker", "index": 0}}',
    "an evaluator": (
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator", "index": 0}}'
    ),
    "an unknown role": (
        '{"cluster": {"boss": ["a:1"], "worker": ["b:1"]}, "task": {"type": "boss", "index": 0}}'
    ),
}

LAUNCH = [
    "--workers=0 --",
    "--workers=two --",
    "--workers=2 --isolate=maybe --",
    "--workers=2 --evaluator --",
    "--workers=2 --timeout_s=0 --",
    "--workers=2 --grace_s=-1 --",
    "--workers=2 --max_restarts=-1 --",
    "--workers=2 --min_workers=3 --",
    "--workers=2 --stall_timeout_s=-1 --",
    "--workers=2 -- --strategy=mirrored",
    "--workers=2 --strategy=multi_worker_mirrored",
    "--hosts=a:1,b:1 --",
    "--hosts=a:1,b:x --task=worker:0 --",
    "--hosts=a:1,b:1 --task=worker:2 --",
    "--hosts=a:1,b:1 --task=worker:0 --min_workers=1 --",
    "--hosts=a:1,b:1 --task=worker:0 --workers=2 --",
    "--",
]

PEERS = "--strategy=multi_worker_mirrored"
DOCTOR = ["--prob", "--steps=1", "--wait_s=soon", "--probe -- --strategy=miror"]

JOBS = [
    "",
    "--target=vertx",
    "--target=slurm --workers=0",
    "--target=slurm --time_limit_h=0",
    "--target=slurm '--name=My job'",
    "--target=slurm --image=i",
    "--target=slurm --accelerator=a100",
    "--target=slurm '--accelerator=a100 x' --accelerators_per_worker=1",
    "--target=slurm --output=gs://bucket/jobs",
    "--target=slurm -- --epocs=3",
    "--target=slurm -- --checkpoint_every=soon",
    "--target=slurm -- --flagfile=none.txt",
    "--target=slurm -- --strategy=tpu",
    "--target=slurm --submit",
    "--target=slurm --follow",
    "--target=slurm -- --strategy=parameter_server",
    "--target=slurm --workers=2 -- --strategy=mirrored",
    f"--target=slurm --ps=1 -- {PEERS}",
    f"--target=slurm --workers=2 -- {PEERS} --global_batch_size=auto",
    "--target=vertex",
    "--target=vertex --image=i",
    "--target=vertex --image=i --accelerator=nvidia-l4 --accelerators_per_worker=1",
    "--target=vertex --image=i -- --run_dir=gs://b/r --data_dir=data",
    "--target=vertex --image=i --machine=a2-highgpu-2g --accelerators_per_worker=1",
    "--target=vertex --image=i --machine=e2-standard-8 --accelerators_per_worker=1",
    "--target=vertex --image=i --accelerator=NVIDIA_L4 --accelerators_per_worker=1",
    "--target=vertex --image=i --machine=n1-standard-64 --accelerators_per_worker=1",
    "--target=vertex --image=i --vertex_tensorboard=projects/p/locations/r/tensorboards/1",
    "--target=vertex --image=i --machine=ct5lp-hightpu-4t",
    "--target=tpu_vm --image=i --workers=2 -- --strategy=tpu --tpu=local",
    "--target=tpu_vm --image=i --accelerator=v5litepod-16 -- --strategy=tpu --tpu=local",
    "--target=tpu_vm --image=i -- --strategy=tpu --tpu=local",
    "--target=kubernetes --image=i",
    "--target=kubernetes --image=i --accelerator=nvidia.com/ --accelerators_per_worker=1",
    "--target=kubernetes --image=i -- --run_dir=gs://b/r --data_dir=/data",
]

REPORT = ["", "none", "--epochs=3 run", "--output=/proc/a.html run"]
SERVE = [
    "",
    "--run_dir=a --model=b",
    "--run_dir=none",
    "--model=none",
    "--model=none --name=My_model",
    "--model=none --port=99999",
    "--model=none --max_batch_size=0",
    "--model=none --allowed_batch_sizes=1,4",
    "--model=none --max_pixels=0",
    "--model=single --devices=GPU:0",
    "--model=none --tune --tune_request=none.json",
    "--model=single --write_tf_serving=jobs",
    "--model=none --write_tf_serving=gs://bucket/serving",
]

# The commands that use a finished run: the function, the options, good flags.
USING = {
    "predict": (
        run_prediction,
        PredictOptions,
        "--run_dir=run --images=photos --masks=truth --output=predicted",
    ),
    "evaluate": (run_evaluation, EvaluateOptions, "--run_dir=run"),
    "export": (EXPORT.run, ExportOptions, "--run_dir=run --output=servable"),
    "verify": (run_verification, VerifyOptions, "--replicas=3 --precision=float32"),
}
USED = [
    "predict --images=",
    "predict --output=",
    "predict '--images=none/*.jpg'",
    "predict --images=empty",
    "predict --masks=none",
    "predict --masks=empty",
    "predict --images=twins --masks=",
    "predict --label_map=white:1",
    "predict --run_dir=none",
    "predict --run_dir=unfinished",
    "predict --overlap=1",
    "predict --zoom=0",
    "predict --zoom=half",
    "predict --devices=GPU:0",
    "predict --strategy=parameter_server",
    "predict --output=/proc/out",
    "evaluate --dataset=folder --data_dir=data --split=tset",
    "evaluate --num_examples=0",
    "evaluate --dataset=folder",
    "evaluate --dataset=folder --data_dir=data",
    "evaluate --label_map=7:1",
    "export --output=",
    "export --version=2",
    "export --format=litert",
    "export --format=onnx --output=model.onnx --quantize=int8",
    "export --format=litert --output=model.tflite --max_lost=-1",
    "verify --strategies=",
    "verify --strategies=mirored",
    "verify --model=unett",
    "verify --model=nowhere.at_all:build",
    "verify --steps=0",
    "verify --global_batch_size=auto",
]

PLAN = [
    "--hardware=h10",
    "--hardware=none.toml",
    "--workers=0",
    "--sweep=workers=4",
    "--sweep=workers=8..2",
    "--calibrate=none/here.toml",
    "--calibrate=here.toml -- --precision=auto",
    "-- --epocs=3",
    "-- --global_batch_size=auto",
    "-- --micro_batches=2",
    "--hardware=tpu-v4 -- --precision=float64",
]


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def check(request, capfd, tmp_path):
    """Checks that a command failed with one line, which docs/errors.md has; returns it."""

    def check_one_line(status, group, what, command, program="tfdist"):
        out, err = capfd.readouterr()
        # libjpeg has a line of its own for a broken file.
        lines = [line for line in err.splitlines() if "JPEG library" not in line]
        assert status == 2, err
        # A command says what it begins, such as reading the data in which it finds a fault.
        assert not re.sub(r"^[\d:]{8} [A-Z].* \.\.\.\n", "", out, flags=re.MULTILINE)
        assert len(lines) == 1, err
        start, _, message = lines[0].partition(": ")
        assert start == program
        for name in ("runs", "jobs", "predicted", "servable"):
            assert not (tmp_path / name).exists()
        assert str(tmp_path) not in message
        assert "Traceback" not in message
        shown = f"`{command}`" if command else what
        row = f"| {shown} | {message.replace('|', '&#124;')} |"
        rows = request.config.stash.setdefault(ROWS, {})
        rows.setdefault(group, []).append(row)
        if not request.config.getoption("--write-docs"):
            assert row in DOCS.read_text().splitlines(), f"not in docs/errors.md: {row}"
        return message

    return check_one_line


ROWS = pytest.StashKey[dict]()


def train(*arguments):
    return run_command(
        "tfdist.train",
        run_training,
        [*SMALL, "--run_dir=runs/a", *arguments],
        options_class=TrainOptions,
    )


@pytest.mark.parametrize(
    ("group", "flags"), [(group, flags) for group in TRAIN for flags in TRAIN[group]]
)
def test_flags(check, group, flags):
    write_folder({})
    check(train(*shlex.split(flags)), group, "", flags)


@pytest.mark.parametrize("what", FILES)
def test_files(check, what):
    write_folder(FILES[what])
    status = train(*shlex.split(FOLDER), "--image_size=8,8")
    check(status, "Files", what, "")


@pytest.mark.parametrize("what", TF_CONFIG)
def test_environment(check, what, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG[what])
    check(train("--strategy=multi_worker_mirrored"), "TF_CONFIG", what, "")


@pytest.mark.parametrize("flags", LAUNCH)
def test_launcher(check, flags, monkeypatch):
    monkeypatch.setattr("sys.argv", ["launch", *shlex.split(flags)])
    try:
        status = launch.main()
    except SystemExit as stop:
        status = stop.code
    check(status, "Launcher", "", f"launch {flags}", "tfdist.launch")


@pytest.mark.parametrize("flags", JOBS)
def test_job_files(check, flags, monkeypatch):
    monkeypatch.setattr("sys.argv", ["jobs", *shlex.split(flags)])
    monkeypatch.setenv("PATH", "")  # a machine without the targets' tools
    check(jobs.main(), "Job files", "", f"jobs {flags}".rstrip())


@pytest.mark.parametrize("arguments", REPORT)
def test_reports(check, arguments, run_dir, monkeypatch):
    os.symlink(run_dir, "run")
    monkeypatch.setattr("sys.argv", ["report", *shlex.split(arguments)])
    check(report.main(), "Reports", "", f"report {arguments}".rstrip())


@pytest.mark.parametrize("flags", SERVE)
def test_serving(check, flags, monkeypatch):
    pathlib.Path("single").mkdir()
    pathlib.Path("single/saved_model.pb").touch()
    monkeypatch.setattr("sys.argv", ["serve", "--port=0", *shlex.split(flags)])
    check(serve.main(), "Serving", "", f"serve {flags}".rstrip())


@pytest.mark.parametrize("flags", PLAN)
def test_plans(check, flags, monkeypatch):
    monkeypatch.setattr("sys.argv", ["plan", *shlex.split(flags)])
    check(plan.main(), "Plans", "", f"plan {flags}")


@pytest.mark.parametrize("flags", DOCTOR)
def test_doctor(check, flags):
    check(doctor.main(shlex.split(flags)), "Doctor", "", f"doctor {flags}")


@pytest.mark.parametrize("command", USED)
def test_commands_that_use_a_run(check, command, run_dir):
    write_images()
    os.symlink(run_dir, "run")
    os.mkdir("unfinished")
    os.symlink(f"{run_dir}/options.json", "unfinished/options.json")
    name, *flags = shlex.split(command)
    run, options, good = USING[name]
    status = run_command(
        f"tfdist.{name}",
        run,
        [*good.split(), *flags],
        options_class=options,
        others=(TrainOptions,),
    )
    check(status, "Using a run, and verifying", "", command)


def test_a_run_of_another_command(check, run_dir, capfd):
    shutil.copytree(run_dir, "run")
    capfd.readouterr()
    status = train(*zoo.SMALL_RUN, "--run_dir=run", "--seed=5")
    message = check(status, "Run directories", "a run of another command", "")
    assert "--seed=5 (there: 0)" in message


def test_a_run_whose_options_a_power_cut_took(check, run_dir, capfd):
    shutil.copytree(run_dir, "run")
    capfd.readouterr()
    pathlib.Path("run/options.json").write_bytes(b"")
    status = train(*zoo.SMALL_RUN, "--run_dir=run")
    check(status, "Run directories", "an empty `options.json`, as after a power cut", "")


def test_a_run_directory_in_use(tmp_path, capfd):
    """Not in the table: it names a process."""
    (tmp_path / "run").mkdir()
    with hold_run_lock("run"):
        assert train("--run_dir=run") == 2
    assert "is in use by process" in capfd.readouterr().err


def write_images():
    """Images to predict: some with their truth, one twice under two extensions, and none."""
    files = {
        "photos/a.jpg": JPEG,
        "truth/a.png": _encode_png(8, 8),
        "twins/a.jpg": JPEG,
        "twins/a.jpeg": JPEG,
        "empty/a.txt": b"",
        "data/val/images/a.jpg": JPEG,
        "data/val/masks/a.png": _encode_png(8, 8, 7),
    }
    for name, content in files.items():
        path = pathlib.Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def write_folder(changes):
    good = {
        f"{split}/{name}": content
        for split in ("train", "val")
        for name, content in (("images/a.jpg", JPEG), ("masks/a.png", _encode_png(8, 8)))
    }
    for name, content in (good | changes).items():
        path = pathlib.Path("data") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            path.write_bytes(content)
    for name in ("val/images", "val/masks", "val"):
        with contextlib.suppress(OSError):
            (pathlib.Path("data") / name).rmdir()


def test_the_table(request):
    """The table has as many rows as there are tests, each of which has found its own."""
    if request.config.getoption("--write-docs"):
        DOCS.write_text(format_table(request.config.stash.get(ROWS, {})))
    lines = DOCS.read_text().splitlines()
    groups = {
        **TRAIN,
        "Files": FILES,
        "TF_CONFIG": TF_CONFIG,
        "Launcher": LAUNCH,
        "Job files": JOBS,
        "Reports": REPORT,
        "Serving": SERVE,
        "Plans": PLAN,
        "Doctor": DOCTOR,
        "Using a run, and verifying": USED,
    }
    rows = [line for line in lines if line.startswith("| ") and line not in HEADS]
    assert len(rows) == len(set(rows)) == sum(map(len, groups.values())) + 2
    assert [line for line in lines if line.startswith("## ")] == [f"## {name}" for name in groups]


HEADS = ("| input | message |", "| what is wrong | message |")


def format_table(rows):
    lines = [
        "# What goes wrong, and what is said",
        "",
        "Bad input costs one line on standard error and exit status 2; nothing is written. Each",
        "message below is what the command said when the tests gave it this input, with otherwise",
        "good flags. `make errors` writes this page.",
    ]
    for group, of_group in rows.items():
        what = "input" if "`" in of_group[0] else "what is wrong"
        lines += ["", f"## {group}", "", f"| {what} | message |", "|---|---|", *of_group]
    return "\n".join(lines) + "\n"
