"""What a process uses and may use."""

import resource
import subprocess
import sys

import pytest

from tfdist import memory

MIB = 2**20


def run_python(code, **options):
    done = subprocess.run(
        [sys.executable, "-c", f"from tfdist import memory; {code}"],
        stdout=subprocess.PIPE,
        check=True,
        timeout=1000,
        **options,
    )
    return int(done.stdout)


def test_counts_what_this_program_uses_and_not_what_its_parent_does():
    ballast = b"1" * (300 * MIB)
    assert memory.measure_peak_memory() > 300 * MIB
    assert run_python("print(memory.measure_peak_memory())") < 100 * MIB
    taken = "a = b'1' * 2**28; del a; print(memory.measure_peak_memory())"
    assert 256 * MIB < run_python(taken) < 400 * MIB
    del ballast


def test_without_proc_all_memory_counts(tmp_path):
    free = memory.find_free_memory(tmp_path)
    assert free.bytes > memory.find_free_memory().bytes
    assert free.where == "on the machine, used or not, because it has no /proc"


def test_keeps_to_ulimit():
    def limit():
        resource.setrlimit(resource.RLIMIT_RSS, (200 * MIB, 200 * MIB))

    free = run_python("print(memory.find_free_memory().bytes)", preexec_fn=limit)
    assert 100 * MIB < free < 200 * MIB
    assert memory.find_free_memory().bytes > free


# Controllers, as in /proc/self/cgroup, and files of a group -> the bytes that are left.
CGROUPS = {
    "v2": (
        "0::/a/b\n",
        {
            "sys/fs/cgroup/a/memory.max": "900000",
            "sys/fs/cgroup/a/memory.current": "300000",
            "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 50000\nactive_file 7\n",
            "sys/fs/cgroup/a/b/memory.max": "max",
        },
        650_000,
    ),
    "v1": (
        "4:memory:/a\n1:cpu:/\n0::/\n",
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
            "sys/fs/cgroup/memory/memory.stat": "",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "700000",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "100000",
            "sys/fs/cgroup/memory/a/memory.stat": "inactive_file 7\ntotal_inactive_file 2000\n",
        },
        602_000,
    ),
    "v1 in a container": (
        "4:memory:/docker/of/the/host\n",
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "500000",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "100000",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
        },
        400_000,
    ),
    "none": ("", {}, 2_048_000),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_keeps_to_a_control_group(name, tmp_path):
    controllers, files, left = CGROUPS[name]
    files |= {"proc/self/cgroup": controllers, "proc/meminfo": "MemAvailable:  2000 kB\n"}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert memory.find_free_memory(tmp_path).bytes == left


class ResourceExhaustedError(Exception):
    """As TensorFlow's, which also stands for a full disk."""


@pytest.mark.parametrize(
    ("error", "begin"),
    [
        (
            ResourceExhaustedError(
                "OOM when allocating tensor with shape[4,8] and type float on /job:localhost/"
                "replica:0/task:0/device:GPU:1 by allocator GPU_1_bfc"
            ),
            "Out of memory on GPU:1 for shape[4,8]. Use a smaller `global_batch_size`",
        ),
        (
            ResourceExhaustedError("Out of memory while trying to allocate 12345 bytes."),
            "Out of memory for 12345 bytes. Use",
        ),
        (
            MemoryError("Unable to allocate 1.5 TiB for an array with shape (9,)"),
            "Out of memory for 1.5 TiB. Use",
        ),
        (MemoryError(), "Out of memory. Use"),
        (ResourceExhaustedError("/run/x; No space left on device"), None),
        (ValueError("Out of memory"), None),
    ],
)
def test_says_what_did_not_fit(error, begin):
    found = memory.describe_lack(error)
    assert found is None if begin is None else found.startswith(begin)


def test_training_says_in_one_line_that_the_memory_is_full(tmp_path):
    # The weights of the second convolution need 1.4 TB.
    model = "--image_size=16,16 --depth=1 --norm=none --base_filters=200000"
    examples = "--train_examples=8 --val_examples=8 --global_batch_size=8"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tfdist.train", "--dataset=shapes", "--strategy=one_device"),
            *(*model.split(), *examples.split(), f"--run_dir={tmp_path}/run"),
        ],
        capture_output=True,
        text=True,
        timeout=1000,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**38, 2**38)),
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("tfdist: Out of memory on CPU:0 for shape[")
    assert "--global_batch_size" in last
    assert "--placement" in last
