"""The launchers: what they start, to the last word, and what they refuse. Programs of a cluster are stand-ins on the
PATH that print their arguments, one a line, in brackets."""

import itertools
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import node_facts
import node_memory
import pytest
import torch
import yaml
from machine_trees import GIB, write_device, write_host, write_pairs

pytest_plugins = ("pytester",)

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "launch"
CONFIG = "train_configs/llama3_8b_128k.toml"
SHELL_FILES = [*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch"), *(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"]

SHOW = '#!/usr/bin/env bash\necho "{name} OMP_NUM_THREADS=${{OMP_NUM_THREADS:-}} ALLOC=${{PYTORCH_ALLOC_CONF:-}}"\n'
SHOW += "printf '[%s]\\n' \"$@\"\n"
SCONTROL = '#!/usr/bin/env bash\n[ "$*" = "show hostnames gpu[07-08]" ] && printf "gpu07\\ngpu08\\n"\n'

NODE_COMMAND = [
    *("--nproc-per-node", "8", "--standalone", "--numa-binding", "node"),
    *("--log-dir", "outputs/logs", "--local-ranks-filter", "0", "--role", "rank", "--tee", "3"),
    *("-m", "titan_offload.titan.train", "--job.config_file", CONFIG),
]
SRUN_COMMAND = [
    *("srun", "--nodes", "2", "--ntasks", "2", "--ntasks-per-node", "1", "--cpus-per-task", "96", "--cpu-bind", "none"),
    *("--mem", "0", "--kill-on-bad-exit", "1"),
    *("env", f"TRAIN_CONFIG={CONFIG}", "NNODES=2", "RDZV_ENDPOINT=gpu07:21234", "RDZV_ID=51234.0"),
    *("LOG_DIR=outputs/logs/51234.0", "launch/torchrun_node.sh"),
]
JOB = {
    "SLURM_JOB_ID": "51234",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_CPUS_ON_NODE": "96",
    "SLURM_SUBMIT_DIR": str(ROOT),
}


@pytest.fixture
def programs(tmp_path):
    """A folder with stand-ins for the programs, to be the first of the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {
        "torchrun": SHOW.format(name="torchrun"),
        "srun": SHOW.format(name="srun"),
        "scontrol": SCONTROL,
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def run(file, programs, *flags, cwd=ROOT, **environment):
    """Runs a launcher with nothing of this process's environment but the PATH."""
    path = f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", str(file), *flags],
        cwd=cwd,
        env={"PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def shown(stdout):
    """The first line of a stand-in, and its arguments."""
    first, *arguments = stdout.splitlines()
    return first, [argument[1:-1] for argument in arguments]


def node(programs, *flags, **environment):
    defaults = {"TRAIN_CONFIG": CONFIG, "NPROC_PER_NODE": "8", "NUMA_BINDING": "node"}
    return run(LAUNCH / "torchrun_node.sh", programs, *flags, **{**defaults, **environment})


def slurm(programs, *flags, **environment):
    return run(LAUNCH / "slurm_multinode.sbatch", programs, *flags, **{"TRAIN_CONFIG": CONFIG, **JOB, **environment})


def assert_refused(outcome, text):
    code, stdout, stderr = outcome
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    assert text in stderr


# Shell


@pytest.mark.parametrize("path", SHELL_FILES, ids=lambda path: path.name)
def test_shellcheck(path):
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program, "shellcheck is a development dependency: pip install -c constraints.txt -e .[dev]"
    done = subprocess.run([program, "-x", "-P", str(LAUNCH), "-P", str(ROOT), path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", [*LAUNCH.glob("*.sbatch"), LAUNCH / "torchrun_node.sh"], ids=lambda path: path.name)
def test_launchers_can_be_run_and_stop_at_the_first_failure(path):
    assert path.stat().st_mode & stat.S_IXUSR
    assert "\nset -euo pipefail\n" in path.read_text()


# Tests


@pytest.mark.parametrize(
    ("file", "flags", "marks"),
    [
        ("scripts/test.sh", ["-k", "corpus"], ["not slow"]),
        ("scripts/test.sh", ["-m", "slow"], ["not slow", "slow"]),
        (".ci/run", [], ["not slow", ""]),
    ],
)
def test_slow_tests_are_left_out_unless_asked_for(programs, tmp_path, file, flags, marks):
    for name in ("python", "ruff"):
        (programs / name).write_text(SHOW.format(name=name))
        (programs / name).chmod(0o755)
    (tmp_path / ".installed-dev").touch()
    code, stdout, _ = run(ROOT / file, programs, *flags, VENV=str(tmp_path))
    arguments = shown(stdout[stdout.index("python ") :])[1]
    assert code == 0
    assert arguments[:2] == ["-m", "pytest"]
    assert [mark for flag, mark in itertools.pairwise(arguments[2:]) if flag == "-m"] == marks
    if file == "scripts/test.sh":
        assert arguments[-len(flags) :] == flags


@pytest.mark.parametrize(("flags", "num"), [((), 1), (("-m", ""), 2), (("-m", "slow"), 1)])
def test_of_several_marks_pytest_takes_the_last(pytester, flags, num):
    pytester.makeini("[pytest]\nmarkers = slow")
    pytester.makepyfile("import pytest\ndef test_quick(): pass\n@pytest.mark.slow\ndef test_slow(): pass\n")
    outcome = pytester.runpytest_inprocess("-m", "not slow", *flags)
    outcome.assert_outcomes(passed=num, deselected=2 - num)


# One node


def test_one_node(programs):
    code, stdout, stderr = node(programs, "--training.steps", "10", "--job.description", "two words")
    assert (code, stderr) == (0, "")
    first, arguments = shown(stdout)
    assert first == "torchrun OMP_NUM_THREADS=1 ALLOC=expandable_segments:True"
    assert arguments == [*NODE_COMMAND, "--training.steps", "10", "--job.description", "two words"]


def test_dry_run_of_one_node_shows_the_command_and_runs_nothing(programs):
    code, stdout, stderr = node(programs, "--dry-run", "--job.description", "two words")
    prefix = "env OMP_NUM_THREADS=1 PYTORCH_ALLOC_CONF=expandable_segments:True torchrun"
    assert (code, stderr) == (0, "")
    assert stdout == f"{prefix} {' '.join(NODE_COMMAND)} --job.description two\\ words\n"


def test_one_of_several_nodes(programs):
    several = {
        "NNODES": "8",
        "RDZV_ENDPOINT": "host:29500",
        "RDZV_ID": "run1",
        "NUMA_BINDING": "none",
        "LOG_DIR": "/logs",
    }
    code, stdout, _ = node(programs, **several, LOG_RANK="0,1", OMP_NUM_THREADS="4")
    first, arguments = shown(stdout)
    assert (code, first) == (0, "torchrun OMP_NUM_THREADS=4 ALLOC=expandable_segments:True")
    assert arguments == [
        *("--nproc-per-node", "8", "--nnodes", "8", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "host:29500", "--rdzv-id", "run1"),
        *("--log-dir", "/logs", "--local-ranks-filter", "0,1", "--role", "rank", "--tee", "3"),
        *("-m", "titan_offload.titan.train", "--job.config_file", CONFIG),
    ]


@pytest.mark.parametrize(
    ("name", "shown_value"),
    [("PYTORCH_ALLOC_CONF", "backend:native"), ("PYTORCH_CUDA_ALLOC_CONF", "")],
)
def test_allocator_settings_of_the_user_hold(programs, name, shown_value):
    _, stdout, _ = node(programs, **{name: "backend:native"})
    assert shown(stdout)[0] == f"torchrun OMP_NUM_THREADS=1 ALLOC={shown_value}"


def test_no_launcher_sets_keys_of_the_pinned_allocator():
    for path in (*SHELL_FILES, *LAUNCH.glob("*.yaml")):
        assert "pinned_max" not in path.read_text() and "pinned_use" not in path.read_text(), path


@pytest.mark.parametrize(
    ("environment", "flags", "text"),
    [
        ({"TRAIN_CONFIG": ""}, [], "TRAIN_CONFIG is not set"),
        ({"TRAIN_CONFIG": "missing.toml"}, [], "TRAIN_CONFIG = missing.toml: no such file below"),
        ({}, ["--nodes", "2"], "--nodes is no flag of TorchTitan"),
        ({}, ["--training.steps", "3", "--dry-run"], "--dry-run is no flag of TorchTitan"),
        ({"NPROC_PER_NODE": "eight"}, [], "NPROC_PER_NODE = eight is not allowed"),
        ({"NNODES": "0"}, [], "NNODES = 0 is not allowed"),
        ({"NNODES": "2", "RDZV_ID": "x"}, [], "RDZV_ENDPOINT is not set, and NNODES = 2"),
        ({"NNODES": "2", "RDZV_ENDPOINT": "host:1"}, [], "RDZV_ID is not set, and NNODES = 2"),
    ],
)
def test_one_node_refuses(programs, environment, flags, text):
    assert_refused(node(programs, *flags, **environment), text)


def test_without_torchrun(programs, tmp_path):
    """On the PATH is only what a shell needs, and the environment that VENV names does not exist."""
    (programs / "torchrun").unlink()
    for name in ("bash", "dirname", "env"):
        (programs / name).symlink_to(shutil.which(name))
    environment = {"PATH": str(programs), "TRAIN_CONFIG": CONFIG, "VENV": "no-such-environment"}
    done = subprocess.run(
        ["bash", LAUNCH / "torchrun_node.sh"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: no torchrun on the PATH") and done.stderr.count("\n") == 1


def test_a_node_says_what_it_has(programs):
    """Of the machine that the tests run on."""
    code, stdout, stderr = run(LAUNCH / "torchrun_node.sh", programs, TRAIN_CONFIG=CONFIG)
    if (num_devices := torch.accelerator.device_count()) == 0:
        assert_refused((code, stdout, stderr), "no device on this node: set NPROC_PER_NODE")
    else:
        assert shown(stdout)[1][:2] == ["--nproc-per-node", str(num_devices)]


def test_a_node_without_devices_trains_on_the_cpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    node_facts.main()
    assert capsys.readouterr() == ("0 none\n", "")


def test_a_node_of_which_torch_knows_the_devices(capsys, monkeypatch):
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert node_facts.pci_addresses() == ["0000:1b:00.0", "0000:1b:00.0"]
    monkeypatch.setattr(node_facts, "why_no_binding", lambda addresses, numactl: None)
    node_facts.main()
    assert capsys.readouterr() == ("2 node\n", "")
    monkeypatch.setattr(node_facts, "why_no_binding", lambda addresses, numactl: "of this and that")
    node_facts.main()
    assert capsys.readouterr() == ("2 none\n", "==> ranks are not bound to NUMA nodes: of this and that\n")


TWO_NODES = {0: (64 * GIB, 48 * GIB, "0-15"), 1: (64 * GIB, 48 * GIB, "16-31")}


def machine(root, numa=TWO_NODES, **host):
    write_host(root, mem_available=96 * GIB, total=128 * GIB, numa=numa, cpus_allowed="0-31", **host)
    return write_pairs(root)


def test_numa_binding_where_torchrun_can(tmp_path):
    addresses = machine(tmp_path)
    assert node_facts.why_no_binding(addresses, tmp_path, "/usr/bin/numactl") is None


def test_no_numa_binding_where_it_would_fail_or_do_nothing(tmp_path):
    addresses = machine(tmp_path)
    why = node_facts.why_no_binding
    assert why(addresses, tmp_path, None) == (
        "numactl is not installed, which torchrun wants (Debian, Ubuntu: apt install numactl)"
    )
    write_device(tmp_path, "0000:c1:00.0", numa_node=-1)
    assert why([*addresses, "0000:c1:00.0"], tmp_path, "numactl") == (
        "the NUMA node of device 8 (0000:c1:00.0) is not known"
    )
    assert why([*addresses, None], tmp_path, "numactl") == "the NUMA node of device 8 (None) is not known"
    write_host(tmp_path, mem_available=96 * GIB, total=128 * GIB, numa=TWO_NODES, cpus_allowed="0-15")
    assert why(addresses, tmp_path, "numactl") == (
        "no CPU of NUMA node 1, where device 4 hangs, is among those this job has"
    )
    assert why(addresses[:4], tmp_path, "numactl") is None
    one = tmp_path / "one"
    addresses = machine(one, numa={0: (128 * GIB, 96 * GIB, "0-31"), 1: (16 * GIB, 16 * GIB, "")})
    assert why(addresses[:4], one, "numactl") == "the machine has one NUMA node"


# SLURM


def test_srun_line_of_a_dry_run(programs):
    code, stdout, stderr = slurm(programs, "--dry-run", "--training.steps", "10")
    assert (code, stderr) == (0, "")
    assert stdout == " ".join([*SRUN_COMMAND, "--training.steps", "10"]) + "\n"


def test_srun_gets_what_the_dry_run_shows(programs):
    code, stdout, stderr = slurm(programs, "--job.description", "two words")
    line, *rest = stdout.splitlines()
    assert (code, stderr) == (0, "")
    assert line == " ".join(SRUN_COMMAND) + " --job.description two\\ words"
    assert shown("\n".join(rest))[1] == [*SRUN_COMMAND[1:], "--job.description", "two words"]


def test_from_sbatch_to_torchrun(programs, tmp_path):
    """SLURM runs a copy of the file from elsewhere; srun starts a task on each node, here on the one there is."""
    (programs / "srun").write_text('#!/usr/bin/env bash\nwhile [ "$1" != env ]; do shift; done\nexec "$@"\n')
    spooled = tmp_path / "slurm_script"
    spooled.write_text((LAUNCH / "slurm_multinode.sbatch").read_text())
    environment = {**JOB, "TRAIN_CONFIG": CONFIG, "NPROC_PER_NODE": "8", "NUMA_BINDING": "node"}
    code, stdout, stderr = run(spooled, programs, "--training.steps", "10", **environment)
    assert (code, stderr) == (0, "")
    assert shown("\n".join(stdout.splitlines()[1:]))[1] == [
        *("--nproc-per-node", "8", "--nnodes", "2", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "gpu07:21234", "--rdzv-id", "51234.0", "--numa-binding", "node"),
        *("--log-dir", "outputs/logs/51234.0", "--local-ranks-filter", "0", "--role", "rank", "--tee", "3"),
        *("-m", "titan_offload.titan.train", "--job.config_file", CONFIG, "--training.steps", "10"),
    ]


def replaced(**changes):
    """The line of `SRUN_COMMAND` with words replaced; None takes the word and the flag before it away."""
    words = list(SRUN_COMMAND)
    for old, new in changes.values():
        index = words.index(old)
        words[index - (new is None) : index + 1] = [] if new is None else [new]
    return " ".join(words) + "\n"


@pytest.mark.parametrize(
    ("environment", "changes"),
    [
        ({"SLURM_MEM_PER_NODE": "524288"}, {"mem": ("0", "524288")}),
        ({"SLURM_MEM_PER_CPU": "8192"}, {"mem": ("0", None)}),
        ({"SLURM_MEM_PER_GPU": "65536"}, {"mem": ("0", None)}),
        ({"SLURM_CPUS_ON_NODE": ""}, {"cpus": ("96", None)}),
        ({"RDZV_PORT": "29500"}, {"port": ("RDZV_ENDPOINT=gpu07:21234", "RDZV_ENDPOINT=gpu07:29500")}),
        ({"LOG_DIR": "/logs"}, {"logs": ("LOG_DIR=outputs/logs/51234.0", "LOG_DIR=/logs")}),
        (
            {"SLURM_RESTART_COUNT": "2"},  # requeued: another rendezvous and other logs, the same run otherwise
            {
                "port": ("RDZV_ENDPOINT=gpu07:21234", "RDZV_ENDPOINT=gpu07:21236"),
                "id": ("RDZV_ID=51234.0", "RDZV_ID=51234.2"),
                "logs": ("LOG_DIR=outputs/logs/51234.0", "LOG_DIR=outputs/logs/51234.2"),
            },
        ),
    ],
)
def test_srun_line_follows_the_job(programs, environment, changes):
    code, stdout, _ = slurm(programs, "--dry-run", **environment)
    assert (code, stdout) == (0, replaced(**changes))


@pytest.mark.parametrize(
    ("environment", "flags", "text"),
    [
        ({"TRAIN_CONFIG": ""}, [], "TRAIN_CONFIG is not set"),
        ({"TRAIN_CONFIG": "missing.toml"}, [], "no such file below"),
        ({"SLURM_JOB_NUM_NODES": ""}, [], "no nodes: SLURM_JOB_NUM_NODES and SLURM_JOB_NODELIST are not set"),
        ({"SLURM_JOB_NODELIST": ""}, ["--dry-run"], "no nodes"),
        ({"SLURM_JOB_NUM_NODES": "3"}, [], "names 2 nodes, and the job has 3"),
        ({"SLURM_JOB_NODELIST": "other"}, [], "names 0 nodes, and the job has 2"),
        ({}, ["--mem", "5"], "--mem is no flag of TorchTitan"),
        ({"SLURM_SUBMIT_DIR": "/usr"}, [], "submit the job in the folder of the repository"),
    ],
)
def test_slurm_refuses(programs, environment, flags, text):
    assert_refused(slurm(programs, *flags, **environment), text)


def test_sbatch_options_of_the_file():
    lines = (LAUNCH / "slurm_multinode.sbatch").read_text().splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    commands = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(not line.startswith("#SBATCH") for line in lines[commands:])  # SLURM reads no further
    assert {"--ntasks-per-node=1", "--mem=0", "--requeue", "--open-mode=append"} <= set(options)
    assert not any(option.startswith("--nodes") for option in options)  # the train config says how many


# Kubernetes


@pytest.fixture(scope="module")
def job_set():
    return yaml.safe_load((LAUNCH / "kubernetes_job.yaml").read_text())


@pytest.fixture
def pod(job_set):
    (replicated,) = job_set["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def environment_of(pod):
    (container,) = pod["template"]["spec"]["containers"]
    return container, {entry["name"]: entry["value"] for entry in container["env"]}


def test_kubernetes_job_starts_the_run(job_set, pod):
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    container, variables = environment_of(pod)
    name, replicated = job_set["metadata"]["name"], job_set["spec"]["replicatedJobs"][0]["name"]
    assert pod["parallelism"] == pod["completions"] == int(variables["NNODES"])
    assert variables["RDZV_ENDPOINT"].split(":")[0] == f"{name}-{replicated}-0-0.{name}"
    assert container["command"] == ["launch/torchrun_node.sh"]
    assert (ROOT / variables["TRAIN_CONFIG"]).is_file()
    assert all(isinstance(value, str) for value in variables.values())  # Kubernetes refuses numbers
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["template"]["spec"]["volumes"]} == {"outputs", "shm"}


def test_kubernetes_command_line(programs, pod):
    container, variables = environment_of(pod)
    done = run(
        LAUNCH / "torchrun_node.sh", programs, *container["args"], **variables, NPROC_PER_NODE="8", NUMA_BINDING="none"
    )
    assert done[0] == 0
    assert shown(done[1])[1] == [
        *("--nproc-per-node", "8", "--nnodes", "8", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "llama3-70b-1m-node-0-0.llama3-70b-1m:29500", "--rdzv-id", "llama3-70b-1m"),
        *("--log-dir", "/outputs/logs", "--local-ranks-filter", "0", "--role", "rank", "--tee", "3"),
        *("-m", "titan_offload.titan.train", "--job.config_file", "train_configs/llama3_70b_1m.toml"),
        *("--job.dump_folder", "/outputs/llama3_70b_1m"),
        *("--model.hf_assets_path", "/outputs/assets/Llama-3.1-70B"),
    ]


def test_kubernetes_memory_is_what_the_plan_needs(pod, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    container, variables = environment_of(pod)
    flags = ["--nodes", variables["NNODES"], "--gpus-per-node", str(container["resources"]["limits"]["nvidia.com/gpu"])]
    assert node_memory.main([variables["TRAIN_CONFIG"], *flags]) == 0
    printed, parts = capsys.readouterr()
    resources = container["resources"]
    assert resources["limits"] == resources["requests"]
    assert resources["limits"]["memory"] == f"{printed.strip()}Gi"
    # 79 block inputs of 512 MiB on each of 8 ranks; a fifth of what is free is left; 8 GiB per rank; /dev/shm.
    assert int(printed) == 475 == -(-(79 * 0.5 * 8 / 0.8 + 8 * 8 + 16) // 1)
    assert "   316.0 GiB  pinned for offload\n" in parts
    (shm,) = (volume["emptyDir"] for volume in pod["template"]["spec"]["volumes"] if volume["name"] == "shm")
    assert shm == {"medium": "Memory", "sizeLimit": f"{node_memory.SHM_GIB}Gi"}


PLAN = {
    "machine": {"devices_per_node": 4},
    "memory": {"pinned_node_bytes": 40 * GIB},
    "offload": {"host_memory_fraction": 0.8},
    "model": {"num_params": 2 * GIB},
    "job": {"num_devices": 16, "data_parallel_replicate": 2, "seq_len": 1024**2},
}


@pytest.mark.parametrize(
    ("config", "shared_gib"),
    [
        ({}, 40),
        ({"checkpoint": {"enable": False, "async_mode": "async"}}, 40),
        # 3 x 4 bytes for each of 2 x 2**30 parameters, over the 8 ranks that share them, on 4 ranks of a node
        ({"checkpoint": {"enable": True, "async_mode": "async"}}, 40 + 3 * 4 * 2 / 8 * 4),
        (
            {"checkpoint": {"enable": True, "async_mode": "async_with_pinned_mem"}, "training": {"dtype": "bfloat16"}},
            40 + 3 * 2 * 2 / 8 * 4,
        ),
        # 2 workers with 384 MiB and 3 batches of 16 MiB each
        (
            {"training": {"local_batch_size": 1, "dataloader": {"num_workers": 2, "prefetch_factor": 3}}},
            40 + 4 * 2 * (3 * 16 + 384) / 1024,
        ),
    ],
)
def test_host_memory_by_hand(config, shared_gib):
    gib, parts = node_memory.node_gib(PLAN, config)
    assert sum(parts.values()) == pytest.approx(shared_gib / 0.8 + 4 * 8 + 16)
    assert gib == -(-(shared_gib / 0.8 + 48) // 1)


def test_host_memory_refuses(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert node_memory.main(["missing.toml"]) == 2
    assert "missing.toml" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"training.enable_cpu_offload = true: .* not reckoned here"):
        node_memory.node_gib(PLAN, {"training": {"enable_cpu_offload": True}})
