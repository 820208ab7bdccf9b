"""Each test plants a real fault, which the doctor must name; docs/doctor.md lists them."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.two_hosts import ADDRESSES, UnavailableError, two_hosts
from tfdist.doctor.machine import Machine
from tfdist.doctor.table import CHECKS

TWO = '{"cluster": {"worker": ["a:2222", "%s"]}, "task": {"type": "worker", "index": 0}}'


@pytest.fixture
def root(path_with_spaces):
    """A root directory in which faults are planted."""
    return path_with_spaces


@pytest.fixture(scope="session")
def report():
    """What the installed TensorFlow reports."""
    return Machine().tensorflow


def plant(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def find(check, machine):
    """Returns the problems that a check finds, as `severity: text`."""
    found = [f"{f.severity}: {f.text}" for f in CHECKS[check](machine) if f.severity != "ok"]
    assert all("\n" not in text for text in found)
    return found


def one(check, **machine):
    """Returns the only problem that a check finds."""
    (problem,) = find(check, Machine(**{"environ": {}} | machine))
    return problem


# The cluster.


@pytest.mark.parametrize(
    ("tf_config", "problem"),
    [
        ('{"cluster": {', "wrong: TF_CONFIG is not JSON"),
        (TWO % "a:2222", "wrong: TF_CONFIG: worker 0 and worker 1 have the same address a:2222"),
        (TWO % "b", "wrong: TF_CONFIG: worker 1: 'b' has no port"),
        ((TWO % "b:1").replace('"index": 0', '"index": 2'), "this process is worker 2, but the"),
    ],
    ids=["not JSON", "duplicate", "no port", "not in it"],
)
def test_a_wrong_tf_config(tf_config, problem):
    assert problem in one("cluster", environ={"TF_CONFIG": tf_config})


def addresses(hosts, task="worker:0", **machine):
    return find("addresses", Machine(hosts=hosts, task=task, wait_s=0.1, **machine))


@pytest.fixture
def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def test_a_task_on_the_wrong_machine():
    (problem,) = addresses("192.0.2.1:2222")
    assert "192.0.2.1 is not an address of this machine. Check --task." in problem


def test_a_port_in_use_and_who_uses_it():
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1])"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; import sys; sys.stdout.flush(); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        (problem,) = addresses(f"127.0.0.1:{holder.stdout.readline().strip()}")
        assert "the port is in use. End the process" in problem
        assert f"It is process {holder.pid} ({sys.executable[:20]}" in problem
        holder.stdin.close()


def test_a_privileged_port():
    first_free = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()
    if os.getuid() or int(first_free) < 1000:
        pytest.skip("this user may listen on every port, or cannot become another")
    os.seteuid(65534)
    try:
        (problem,) = addresses("127.0.0.1:999")
    finally:
        os.seteuid(0)
    assert "ports below 1024 are only for root. Choose another." in problem


def test_a_name_that_does_not_resolve(free_port):
    (problem,) = addresses(f"127.0.0.1:{free_port},nowhere.invalid:2222", "worker:0")[1:] or [""]
    assert "wrong: worker 1 (nowhere.invalid:2222): cannot resolve nowhere.invalid" in problem


def test_a_name_that_is_a_loopback_address(tmp_path):
    (tmp_path / "hosts").write_text("127.0.1.1 node1\n192.0.2.1 node2\n")
    mount = f"mount --bind '{tmp_path}/hosts' /etc/hosts"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no right to mount /etc/hosts")
    flags = "hosts='node1:2222,node2:2222', task='worker:0', wait_s=0.1"
    code = "from tfdist.doctor.machine import Machine; from tfdist.doctor.table import CHECKS\n"
    code += f"print(*CHECKS['addresses'](Machine({flags})), sep='\\n')"
    script = f'{mount} && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, sys.executable, code],
        capture_output=True,
        text=True,
        timeout=1000,
        check=True,
    )
    assert "node1 is 127.0.1.1 here, a loopback address" in done.stdout


@pytest.mark.thorough
def test_a_port_behind_a_firewall():
    run = [sys.executable, "-m", "tfdist.launch", "--check", "--wait_s=4"]
    hosts = f"--hosts={ADDRESSES[0]}:2222,{ADDRESSES[1]}:2222"
    try:
        with two_hosts() as made:
            made.drop_packets_to(1, 2222)
            tasks = [
                subprocess.Popen(
                    made.on(host, [*run, hosts, f"--task=worker:{host}"]),
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for host in range(2)
            ]
            said = [task.communicate(timeout=1000)[0] for task in tasks]
    except UnavailableError as error:
        pytest.skip(str(error))
    assert f"{ADDRESSES[1]} does not answer. Check that the machine is up and no fire" in said[0]
    assert f"{ADDRESSES[0]} answers" in said[1]


def test_a_proxy_between_the_tasks():
    environ = {"http_proxy": "http://proxy:3128", "TF_CONFIG": TWO % "b:2222"}
    assert "http_proxy is set, so TensorFlow sends what is for a, b to" in one(
        "proxies", environ=environ
    )
    assert not find("proxies", Machine(environ={**environ, "no_proxy": "a,b"}))


PEER = """
import sys, time
{}
from tfdist.doctor.machine import Machine
from tfdist.doctor.table import CHECKS
machine = Machine(hosts=sys.argv[1], task=sys.argv[2], wait_s=3, {})
print("ready", flush=True)
sys.stdin.readline()
print(*(finding.text for finding in CHECKS["peers"](machine)), sep="\\n")
"""


def peers(*machines, before=""):
    """Returns what each task of a cluster finds if all of them run the check at once.

    Args:
      *machines: the further arguments of each task's `Machine`, as code.
      before: code that each task runs first.
    """
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in machines]
        for holder in held:
            holder.bind(("127.0.0.1", 0))
        hosts = ",".join(f"127.0.0.1:{holder.getsockname()[1]}" for holder in held)
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", PEER.format(before, machine), hosts, f"worker:{index}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index, machine in enumerate(machines)
    ]
    for task in tasks:  # however long a busy machine takes to start them
        assert task.stdout.readline() == "ready\n"
    for task in tasks:
        task.stdin.write("go\n")
        task.stdin.flush()
    return [task.communicate(timeout=1000)[0].strip() for task in tasks]


def test_tasks_that_agree(path_with_spaces):
    machine = f"directory={str(path_with_spaces)!r}"
    agree = f"all tasks agree: versions, clocks, the directory {path_with_spaces}"
    assert peers(machine, machine, machine) == [agree] * 3
    assert not list(path_with_spaces.iterdir())


STRANGER = """
def shout():
    while True:
        try:
            with socket.create_connection(split_address(sys.argv[1].split(",")[0])) as stranger:
                stranger.sendall(b"null\\n")
                stranger.recv(1)
                return
        except ConnectionRefusedError:
            time.sleep(0.01)
import socket, threading
from tfdist.cluster import split_address
threading.Thread(target=shout).start()
"""


def test_a_stranger_between_the_tasks():
    first, second = peers("", "", before=STRANGER)
    assert first == second == "all tasks agree: versions, clocks"


def test_a_clock_that_is_wrong():
    first, second = peers("", "clock=lambda: time.time() - 90")
    assert first == second
    assert re.search(r"the clock of worker 1 is (89\.9|90\.\d) s behind that of worker 0", first)


def test_a_directory_that_is_not_shared(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, second = peers(*(f"directory={str(tmp_path / name)!r}" for name in ("a", "b")))
    assert first == second
    assert f"worker 1 does not see in {tmp_path}/b what worker 0 writes" in first


def install(directory, **versions):
    """Installs packages that have a name, a version and requirements, and nothing else."""
    for name, (version, *requirements) in versions.items():
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
        metadata = f"{name.replace('-', '_')}-{version}.dist-info/METADATA"
        plant(directory, {metadata: "\n".join(lines) + "\n\n"})
    return (str(directory),)


@pytest.mark.thorough
def test_another_version_on_another_machine(tmp_path):
    packages = install(tmp_path, tfdist=("0.1.0",), tensorflow=("2.20.0",), keras=("3.15.1",))
    first, second = peers("", f"packages={packages!r}")
    assert first == second
    assert "worker 1 has tensorflow 2.20.0, worker 0 has 2.21.0. Install the same" in first


# The installation.


def test_a_version_that_does_not_match(tmp_path):
    packages = install(tmp_path, tfdist=("0.1.0", "keras (>=3.15,<3.16)"), keras=("3.10.0",))
    problem = one("versions", packages=packages)
    assert "keras 3.10.0 is installed, but tfdist 0.1.0 needs <3.16,>=3.15. Run pip" in problem


def test_a_version_of_cudnn_that_does_not_match(tmp_path):
    packages = install(
        tmp_path,
        tensorflow=("2.21.0", 'nvidia-cudnn-cu12 <10.0,>=9.3 ; extra == "and-cuda"'),
        **{"nvidia-cudnn-cu12": ("8.9.7",)},
    )
    problem = one("versions", packages=packages)
    assert "nvidia-cudnn-cu12 8.9.7 is installed, but tensorflow 2.21.0 needs" in problem


def test_two_tensorflows(tmp_path):
    packages = install(tmp_path, tensorflow=("2.21.0",), **{"tensorflow-cpu": ("2.21.0",)})
    assert "tensorflow-cpu and tensorflow are both installed" in one("versions", packages=packages)


def test_a_package_that_is_missing(tmp_path):
    packages = install(tmp_path, tfdist=("0.1.0", "absl-py>=2.1"))
    assert "tfdist needs absl-py, which is not installed" in one("versions", packages=packages)


def test_a_tensorflow_that_cannot_be_imported(tmp_path):
    plant(tmp_path, {"tensorflow.py": "raise ImportError('libfoo.so: cannot open it')"})
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    problem = one("tensorflow", environ=environ)
    assert "cannot be imported: ImportError: libfoo.so: cannot open it" in problem


def test_a_processor_without_avx(root):
    plant(root, {"proc/cpuinfo": "processor: 0\nflags\t\t: fpu sse4_2\n"})
    assert "the processor has no AVX" in one("tensorflow", root=root)


def test_another_backend():
    problem = one("tensorflow", environ={"KERAS_BACKEND": "jax"})
    assert "wrong: KERAS_BACKEND=jax: tfdist trains with TensorFlow. Unset it." in problem


# GPUs.

BUS = {
    "sys/bus/pci/devices/0000:00:1e.0/vendor": "0x10de\n",
    "sys/bus/pci/devices/0000:00:1e.0/class": "0x030200\n",
}
DRIVER = {"proc/driver/nvidia/gpus/0000:00:1e.0/information": "Model: NVIDIA A100\n"}
VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Oct 24\nGCC version: 12\n"
GOOD = {**BUS, **DRIVER, "proc/driver/nvidia/version": VERSION.format("550.54.15")}
NODE = {"dev/nvidia0": "", "dev/nvidiactl": ""}


def test_a_gpu_without_a_driver(root):
    plant(root, BUS)
    assert "1 NVIDIA GPU, but no driver is loaded. Install" in one("gpus", root=root)


def test_a_container_without_the_gpu(root):
    plant(root, GOOD)
    problem = one("gpus", root=root)
    assert "1 NVIDIA GPU with driver 550.54.15, but this container has no /dev/nvidia0" in problem
    assert "docker run --gpus=all" in problem


def test_a_driver_that_is_too_old(root, report):
    plant(root, {**GOOD, **NODE, "proc/driver/nvidia/version": VERSION.format("470.223.02")})
    problem = one("gpus", root=root, report=report)
    assert "driver 470.223.02 is too old: TensorFlow is built for CUDA 12" in problem


def test_gpus_hidden_by_a_variable(root, report):
    plant(root, {**GOOD, **NODE})
    problem = one("gpus", root=root, report=report, environ={"CUDA_VISIBLE_DEVICES": "-1"})
    assert "wrong: CUDA_VISIBLE_DEVICES=-1 shows 0 of 1 GPUs. Unset it" in problem


def test_a_gpu_that_is_newer_than_tensorflow(root):
    plant(root, {**GOOD, **NODE})
    report = {
        **{"tensorflow": "2.21.0", "is_cuda_build": True, "cuda_version": "12.5.1"},
        **{"cuda_compute_capabilities": ["sm_60", "sm_89", "compute_90"], "libcuda": ""},
        **{"gpus": ["/physical_device:GPU:0"], "compute_capabilities": [[12, 0]]},
    }
    problem = one("gpus", root=root, report=report)
    assert "GPU:0 has compute capability 12.0, but TensorFlow 2.21.0 is built for 9.x" in problem
    assert not find("gpus", Machine(root=root, report={**report, "cuda_compute_capabilities": []}))


def test_a_driver_without_its_library(root, report):
    if not report["libcuda"]:
        pytest.skip("this machine has NVIDIA's driver")
    plant(root, {**GOOD, **NODE})
    problem = one("gpus", root=root, report=report)
    assert "NVIDIA's driver library does not work: libcuda.so.1: cannot open" in problem


def test_missing_cuda_libraries(root, report, tmp_path):
    plant(root, {**GOOD, **NODE})
    driver_works = {**report, "libcuda": "", "gpus": []}
    problem = one("gpus", root=root, report=driver_works, packages=(str(tmp_path),))
    assert "CUDA's libraries are not installed. Run pip install 'tensorflow[and-cuda]'" in problem


def test_a_process_that_holds_a_gpu(root, report):
    plant(root, {**GOOD, **NODE, "proc/4242/cmdline": "python\0train.py\0"})
    (root / "proc/4242/fd").mkdir()
    (root / "proc/4242/fd/7").symlink_to("/dev/nvidia0")
    problem = one("gpus", root=root, report={**report, "libcuda": "", "gpus": ["GPU:0"]})
    assert "slow: process 4242 (python train.py) uses /dev/nvidia0. End it" in problem


# Cores, memory, files.


@pytest.mark.parametrize("version", [1, 2])
def test_a_quota_below_the_cores(root, version):
    if version == 2:
        plant(root, {"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"})
    else:
        plant(root, {"proc/self/cgroup": "3:cpu,cpuacct:/docker/1\n"})
        place = "sys/fs/cgroup/cpu,cpuacct"
        plant(root, {f"{place}/cpu.cfs_quota_us": "50000", f"{place}/cpu.cfs_period_us": "100000"})
    assert "slow: the container may use 0.5 of the " in one("cores", root=root)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("OMP_NUM_THREADS", "1000", "slow: OMP_NUM_THREADS=1000 for "),
        ("OMP_NUM_THREADS", "all", "wrong: OMP_NUM_THREADS=all is not a number"),
        ("TF_NUM_INTEROP_THREADS", "1", "wrong: TensorFlow has a single inter-op thread"),
        ("TF_ENABLE_ONEDNN_OPTS", "0", "slow: TF_ENABLE_ONEDNN_OPTS=0 turns oneDNN's fast kernels"),
        ("TF_ENABLE_ONEDNN_OPTS", "off", "wrong: TF_ENABLE_ONEDNN_OPTS=off is neither 0 nor 1"),
    ],
)
def test_a_wrong_variable(root, name, value, problem):
    assert problem in one("cores", root=root, environ={name: value, "TF_CONFIG": TWO % "b:2222"})


MEMORY = "MemAvailable: 8000000 kB\nSwapTotal: 8000000 kB\nSwapFree: 8000000 kB\n"


def test_a_container_without_memory(root):
    group = "sys/fs/cgroup/"
    plant(root, {"proc/meminfo": MEMORY, "proc/self/cgroup": "0::/\n"})
    plant(root, {f"{group}memory.max": str(2**30), f"{group}memory.current": str(2**30 - 2**28)})
    plant(root, {f"{group}memory.stat": "inactive_file 0\n"})
    problem = one("memory", root=root)
    assert "only 0.2 GiB of memory are free in the container or control group" in problem


def test_swapped_memory(root):
    plant(root, {"proc/meminfo": MEMORY.replace("SwapFree: 8", "SwapFree: 1")})
    assert "slow: 6.7 GiB of memory are swapped out" in one("memory", root=root)


@pytest.fixture
def mount():
    """Mounts a small file system on a directory, until the test ends."""
    with contextlib.ExitStack() as stack:

        def mount(path, options):
            path.mkdir(parents=True, exist_ok=True)
            command = ["mount", "-t", "tmpfs", "-o", options, "none", str(path)]
            if subprocess.run(command, capture_output=True).returncode:
                pytest.skip("no right to mount a tmpfs")
            stack.callback(subprocess.run, ["umount", str(path)], check=True)

        yield mount


def test_a_full_dev_shm(root, mount):
    mount(root / "dev/shm", "size=1m")
    assert "wrong: 1 of 1 MiB are free in /dev/shm" in one("shared memory", root=root)


def test_a_dev_shm_that_is_too_small_for_two_gpus(root, mount):
    mount(root / "dev/shm", "size=64m")
    assert not find("shared memory", Machine(root=root, environ={}))
    plant(root, {**BUS, **{name.replace("1e", "1f"): text for name, text in BUS.items()}})
    assert "wrong: 64 of 64 MiB are free in /dev/shm" in one("shared memory", root=root)


def test_a_full_disk(root, mount):
    mount(root / "runs", "size=2m")
    problem = one("disk", directory=str(root / "runs" / "new"))
    assert f"wrong: only 2 MiB are free in {root}/runs/new, for the run" in problem


def test_a_disk_without_inodes(root, mount):
    mount(root / "runs", "size=2g,nr_inodes=8")
    assert "wrong: only 7 files can still be created" in one("disk", directory=str(root / "runs"))


def test_a_read_only_directory(root, mount):
    mount(root / "runs", "ro")
    problem = one("disk", directory=str(root / "runs"))
    assert "for the run, cannot be written. Choose another" in problem


def test_few_open_files():
    code = "from tfdist.doctor.machine import Machine; from tfdist.doctor.table import CHECKS\n"
    code += "print(*CHECKS['open files'](Machine()), sep='\\n')"
    command = ["sh", "-c", 'ulimit -n 64; exec "$0" -c "$1"', sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=True)
    assert "a process may open only 64 files, sockets included. Run ulimit -n 1024" in done.stdout
