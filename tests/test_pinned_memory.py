"""Pinned memory of AcceleratorRuntime on a real machine with a driver that records: mapping, NUMA node, touch,
registration, what a failure leaves behind, and the turn among ranks."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import signal
import subprocess
import sys
import threading
import types

import pytest
import torch

from titan_offload import pinned_memory
from titan_offload.pinned_memory import HUGE_PAGE, MAX_BYTES, MAX_BYTES_OF_OLD_KERNELS, PORTABLE
from titan_offload.runtime import AcceleratorRuntime

MIB = 1024**2
ALREADY_REGISTERED, OUT_OF_MEMORY = 712, 2
LIBC = ctypes.CDLL(None, use_errno=True)
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}


def pages_of(address: int, num_bytes: int) -> list[bool] | None:
    """For each page whether it exists; None: this is not mapped."""
    pages = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    if LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), pages) != 0:
        assert ctypes.get_errno() == errno.ENOMEM
        return None
    return [bool(page & 1) for page in pages]


def policy_of(address: int) -> tuple[int, int]:
    """Memory policy of a page, and the nodes in it as bits."""
    mode, mask = ctypes.c_int(), ctypes.c_ulong()
    arguments = (ctypes.addressof(mode), ctypes.addressof(mask), 65, address, 2)  # MPOL_F_ADDR
    assert LIBC.syscall(*map(ctypes.c_long, (GET_MEMPOLICY[platform.machine()], *arguments))) == 0
    return mode.value, mask.value


class Driver:
    """The CUDA runtime as far as host registration goes, with its habit of keeping the last error."""

    def __init__(self) -> None:
        self.log: list[tuple] = []
        self.refuses = False
        self.registered: dict[int, int] = {}
        self.last_error = 0
        self.on_register = lambda pointer, num_bytes: None

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:
        self.log.append(("register", num_bytes, flags))
        self.on_register(pointer, num_bytes)
        self.pointer = pointer
        ends = [(start, start + size) for start, size in self.registered.items()]
        if any(pointer < end and start < pointer + num_bytes for start, end in ends):
            self.last_error = ALREADY_REGISTERED
        elif self.refuses:
            self.last_error = OUT_OF_MEMORY
        else:
            self.registered[pointer] = num_bytes
            return 0
        return self.last_error

    def cudaHostUnregister(self, pointer: int) -> int:
        self.log.append(("unregister", self.registered.pop(pointer)))
        return 0

    def synchronize(self) -> None:
        self.log.append(("synchronize",))

    def launch(self, *args: object, **kwargs: object) -> None:
        """A kernel launch of torch raises whatever error the thread has left, and takes it away."""
        self.log.append(("launch",))
        error, self.last_error = self.last_error, 0
        self.check_error(error)

    def check_error(self, error: int) -> None:
        if error:
            raise RuntimeError(f"out of memory ({error})\nwhat torch says of debugging kernels")


@pytest.fixture
def driver(monkeypatch, tmp_path):
    driver = Driver()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "check_error", driver.check_error)
    monkeypatch.setattr(torch.cuda, "synchronize", driver.synchronize)
    monkeypatch.setattr(torch, "ones", driver.launch)
    monkeypatch.setattr(pinned_memory.tempfile, "gettempdir", lambda: str(tmp_path))
    return driver


# Mapping, touching, registering


def test_slab_is_mapped_bound_touched_registered_and_unregistered(driver):
    """Guards: the order in `map_and_register`."""
    num_bytes = 3 * HUGE_PAGE + 512

    def bind(address, size):
        driver.log.append(("bind", size))
        assert set(pages_of(address, size)) == {False}  # a policy is for pages that do not exist yet

    driver.on_register = lambda address, size: driver.log.append(("touched", all(pages_of(address, size))))
    buffer, unregister = pinned_memory.map_and_register(num_bytes, bind)
    assert (buffer.dtype, buffer.shape, int(buffer.sum())) == (torch.uint8, (num_bytes,), 0)
    unregister()
    assert driver.log == [
        ("bind", num_bytes),
        ("register", num_bytes, PORTABLE),
        ("touched", True),
        ("unregister", num_bytes),
    ]
    address, view = buffer.data_ptr(), buffer[512:].fill_(1)
    del buffer
    assert int(view.sum()) == num_bytes - 512
    del view
    assert pages_of(address, num_bytes) is None
    assert len(driver.log) == 4


def test_memory_that_is_dropped_is_unregistered_before_it_is_unmapped(driver):
    """F95: else whatever is mapped there later is "already registered". A copy on it may still be under way. Guards:
    the finalizer, and its wait."""
    buffer = AcceleratorRuntime().allocate_pinned(MIB)
    address = buffer.data_ptr()
    unregister = driver.cudaHostUnregister
    driver.cudaHostUnregister = lambda pointer: (
        driver.log.append(pages_of(pointer, MIB) is None),
        unregister(pointer),
    )[1]
    view = buffer[512:]
    del buffer
    assert driver.registered == {address: MIB}
    assert int(view.sum()) == 0
    del view
    assert driver.log[1:] == [("synchronize",), False, ("unregister", MIB)]
    assert pages_of(address, MIB) is None


def test_memory_that_is_dropped_is_unregistered_though_the_device_is_lost(driver, monkeypatch):
    def fail() -> None:
        raise RuntimeError("device lost")

    told = []
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    monkeypatch.setattr(sys, "unraisablehook", lambda args: told.append(str(args.exc_value)))
    AcceleratorRuntime().allocate_pinned(MIB)
    assert driver.registered == {}
    assert told == ["device lost"]


def test_memory_that_was_given_back_is_not_unregistered_again(driver):
    buffer, unregister = pinned_memory.map_and_register(MIB, lambda address, size: None)
    unregister()
    unregister()
    del buffer
    assert driver.log == [("register", MIB, PORTABLE), ("unregister", MIB)]


def test_runtime_registers_and_unregisters(driver):
    runtime = AcceleratorRuntime()
    buffer = runtime.allocate_pinned(MIB)
    assert driver.registered == {buffer.data_ptr(): MIB}
    runtime.free_pinned(buffer)
    assert driver.log == [("register", MIB, PORTABLE), ("unregister", MIB)]


def test_forked_children_do_not_inherit_pinned_pages(driver):
    """Guards: MADV_DONTFORK."""
    buffer = AcceleratorRuntime().allocate_pinned(MIB)
    child = os.fork()
    if child == 0:
        os._exit(int(pages_of(buffer.data_ptr(), MIB) is not None))
    assert os.waitpid(child, 0)[1] == 0


def test_a_kernel_without_huge_pages_will_do(driver, monkeypatch):
    class Pages(mmap.mmap):
        def madvise(self, option):
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(errno.EINVAL, "Invalid argument")
            super().madvise(option)

    monkeypatch.setattr(pinned_memory.mmap, "mmap", Pages)
    assert AcceleratorRuntime().allocate_pinned(MIB).numel() == MIB


@pytest.mark.parametrize(
    ("num_cpus", "torch_threads", "num_threads"), [(1, 1, 1), (2, 1, 2), (64, 1, 8), (64, 4, 2), (64, 64, 1), (4, 3, 1)]
)
def test_pages_are_touched_by_the_cpus_of_the_process(monkeypatch, num_cpus, torch_threads, num_threads):
    """torchrun sets OMP_NUM_THREADS=1. Guards: `touch`."""
    sizes, made = [], []

    class Threads:
        def __init__(self, number):
            made.append(number)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def map(self, function, pieces):
            sizes.extend(piece.numel() for piece in pieces)
            return map(function, pieces)

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(num_cpus)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: torch_threads)
    monkeypatch.setattr(pinned_memory, "ThreadPoolExecutor", Threads)
    buffer = torch.ones(16 * HUGE_PAGE - 5, dtype=torch.uint8)
    pinned_memory.touch(buffer)
    assert made == [num_threads]
    assert len(sizes) == num_threads
    assert sum(sizes) == buffer.numel()
    assert all(size % HUGE_PAGE == 0 for size in sizes[:-1])
    assert not buffer.any()


def test_pages_are_touched_at_the_same_time(monkeypatch):
    """Guards: the threads in `touch`."""
    together = threading.Barrier(4, timeout=10)
    zero = torch.Tensor.zero_
    monkeypatch.setattr(torch.Tensor, "zero_", lambda tensor: (together.wait(), zero(tensor)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    buffer = torch.ones(4 * HUGE_PAGE, dtype=torch.uint8)
    pinned_memory.touch(buffer)
    assert not buffer.any()


@pytest.mark.parametrize(
    ("release", "num_bytes"),
    [
        ("5.15.0-113-generic", MAX_BYTES),
        ("6.1.90", MAX_BYTES),
        ("6.10.14", MAX_BYTES),
        ("6.11.0-1", MAX_BYTES_OF_OLD_KERNELS),
        ("6.12.3-64k", MAX_BYTES_OF_OLD_KERNELS),
        ("6.13.12", MAX_BYTES_OF_OLD_KERNELS),
        ("6.14.0", MAX_BYTES),
        ("6.110.0", MAX_BYTES),
        ("7.12.0", MAX_BYTES),
        ("of our own", MAX_BYTES),
    ],
)
def test_largest_piece_by_kernel(driver, monkeypatch, release, num_bytes):
    """field.md, F92 and F93."""
    assert pinned_memory.max_pinned_bytes(release) == num_bytes
    monkeypatch.setattr(platform, "release", lambda: release)
    assert AcceleratorRuntime().max_pinned_bytes == num_bytes
    assert (MAX_BYTES, MAX_BYTES_OF_OLD_KERNELS) == (64 * 1024**3, 2_000_000_000)


# What fails


@pytest.mark.parametrize("torch_has_binding", [False, True])
def test_refused_registration_leaves_nothing_behind(driver, torch_has_binding):
    """Not the pages, though the error and its traceback are alive; not the driver's last error, which torch's next
    kernel launch would raise; and the same pages can be registered later (F95)."""
    if torch_has_binding:
        driver.cudaGetLastError = lambda: setattr(driver, "last_error", 0)
    driver.refuses = True
    runtime = AcceleratorRuntime()
    with pytest.raises(RuntimeError) as caught:
        runtime.allocate_pinned(64 * MIB)
    assert pages_of(driver.pointer, 64 * MIB) is None
    assert driver.last_error == 0
    assert ("launch",) not in driver.log or not torch_has_binding
    driver.launch()  # does not raise
    assert caught.value.__traceback__ is not None
    driver.refuses = False
    buffer = runtime.allocate_pinned(64 * MIB)
    assert driver.registered == {buffer.data_ptr(): 64 * MIB}
    runtime.free_pinned(buffer)


def test_refused_registration_names_pinned_host_memory(driver):
    """F87: a bare "CUDA error: out of memory" hides that host memory is meant."""
    driver.refuses = True
    with pytest.raises(RuntimeError) as caught:
        AcceleratorRuntime().allocate_pinned(10 * MIB)
    assert str(caught.value) == (
        "no 0.01 GiB of pinned host memory (host memory, not device memory): out of memory (2)"
    )


def test_failed_unregistration_is_an_error(driver):
    runtime = AcceleratorRuntime()
    buffer = runtime.allocate_pinned(MIB)
    driver.cudaHostUnregister = lambda pointer: 713
    with pytest.raises(RuntimeError, match="713"):
        runtime.free_pinned(buffer)


def test_no_room_to_map_names_pinned_host_memory(driver):
    with pytest.raises(RuntimeError, match=r"^no 1073741824\.00 GiB of pinned host memory .*Cannot allocate memory$"):
        AcceleratorRuntime().allocate_pinned(1 << 60)
    assert driver.log == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "CUDA error: out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "CUDA out of memory. Tried"),
        (torch.AcceleratorError("XPU error: 39\nmore"), "XPU error: 39"),
        (MemoryError(), "MemoryError"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "[Errno 12] Cannot allocate memory"),
    ],
)
def test_what_torch_says_of_pinned_memory_is_said_to_be_of_host_memory(driver, monkeypatch, error, said):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(RuntimeError) as caught:
        AcceleratorRuntime("xpu").allocate_pinned(3 * 1024**3)
    # Not the type of a device that is out of memory: whoever catches that would free device memory.
    assert type(caught.value) is RuntimeError
    assert str(caught.value) == f"no 3.00 GiB of pinned host memory (host memory, not device memory): {said}"


# Without registration


def test_pinned_memory_without_registration_comes_from_torch(driver, monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: (args, kwargs))
    runtime = AcceleratorRuntime("xpu")
    runtime.numa_node = 63  # nothing to bind
    assert runtime.allocate_pinned(640) == ((640,), {"dtype": torch.uint8, "device": "cpu", "pin_memory": True})
    assert runtime.pinned_bytes(640) == 1024
    runtime.free_pinned(torch.zeros(0))
    assert driver.log == []


def test_pinned_bytes_round_up_to_a_power_of_two_only_without_registration(driver):
    """field.md, F72 and F74: what torch's pinned allocator takes for what was asked for."""
    gib = 1024**3
    exact = [80 * MIB, int(20.4 * gib), int(2.25 * gib), 4 * gib, 4 * gib + 1, 512, 1]
    rounded = [128 * MIB, 32 * gib, 4 * gib, 4 * gib, 8 * gib, 512, 1]
    assert [AcceleratorRuntime("xpu").pinned_bytes(num_bytes) for num_bytes in exact] == rounded
    assert [AcceleratorRuntime("cuda").pinned_bytes(num_bytes) for num_bytes in exact] == exact


# NUMA


def has_policies() -> bool:
    """Whether this kernel and container let a process set memory policies."""
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        try:
            pinned_memory.bind_to_node(torch.frombuffer(pages, dtype=torch.uint8).data_ptr(), mmap.PAGESIZE, 0)
        except OSError:
            return False
    return True


NEEDS_POLICIES = pytest.mark.skipif(not has_policies(), reason="no system calls of memory policy here")


@NEEDS_POLICIES
@pytest.mark.parametrize("node", [-1, 0])
def test_slab_comes_from_the_node_asked_for(driver, node):
    """All pages of it, the last one too. Guards: `_bind`, and that it comes before the touch."""
    runtime = AcceleratorRuntime()
    runtime.numa_node = node
    num_bytes = HUGE_PAGE + 3 * mmap.PAGESIZE + 512
    buffer = runtime.allocate_pinned(num_bytes)
    expected = (pinned_memory.MPOL_PREFERRED, 1 << 0) if node == 0 else (0, 0)
    places = (0, HUGE_PAGE, num_bytes - 1)
    assert [policy_of(buffer.data_ptr() + place) for place in places] == [expected] * 3
    assert runtime.numa_node == node


def test_a_node_that_does_not_exist_gives_one_warning(driver, caplog):
    runtime = AcceleratorRuntime()
    runtime.numa_node = 63
    buffers = [runtime.allocate_pinned(MIB) for _ in range(3)]
    assert [buffer.numel() for buffer in buffers] == [MIB] * 3
    assert len(caplog.records) == 1
    assert "cannot be taken from NUMA node 63" in caplog.text
    assert "Invalid argument" in caplog.text or "Operation not permitted" in caplog.text
    assert runtime.numa_node == -1


def test_refused_memory_policies_give_one_warning(driver, caplog, monkeypatch):
    """Seccomp profiles of containers: EPERM; old sandboxes: ENOSYS."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: types.SimpleNamespace(syscall=lambda *args: -1))
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EPERM)
    runtime = AcceleratorRuntime()
    runtime.numa_node = 0
    assert [runtime.allocate_pinned(MIB).numel() for _ in range(2)] == [MIB, MIB]
    assert len(caplog.records) == 1
    assert "NUMA node 0" in caplog.text
    assert "Operation not permitted" in caplog.text


def test_a_machine_of_another_kind_is_an_os_error(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="mbind on riscv64"):
        pinned_memory.bind_to_node(0, mmap.PAGESIZE, 0)


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 237), ("aarch64", 235)])
@pytest.mark.parametrize("node", [0, 1, 63, 64, 200])
def test_mask_of_nodes(monkeypatch, machine, number, node):
    """As the kernel reads it: bits below ``maxnode - 1``, in unsigned longs. Guards: `bind_to_node`."""
    calls = []

    def syscall(*args):
        called, address, num_bytes, mode, mask, maxnode, flags = (arg.value for arg in args)
        num_bits = maxnode - 1
        words = (ctypes.c_ulong * -(-num_bits // 64)).from_address(mask)
        nodes = [bit for bit in range(num_bits) if words[bit // 64] >> bit % 64 & 1]
        calls.append((called, address, num_bytes, mode, nodes, flags))
        return 0

    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: types.SimpleNamespace(syscall=syscall))
    pinned_memory.bind_to_node(7 * mmap.PAGESIZE, mmap.PAGESIZE + 1, node)
    assert calls == [(number, 7 * mmap.PAGESIZE, 2 * mmap.PAGESIZE, 1, [node], 0)]


# The turn among ranks


def is_taken(folder) -> bool:
    [path] = folder.iterdir()
    with path.open("r") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.parametrize("refuses", [False, True])
def test_ranks_of_a_host_pin_one_at_a_time(driver, tmp_path, refuses):
    """Guards: `one_rank_at_a_time` around registration, and that it ends, whatever happens."""
    taken = []
    driver.refuses = refuses
    driver.on_register = lambda pointer, num_bytes: taken.append(is_taken(tmp_path))
    with contextlib.suppress(RuntimeError):
        AcceleratorRuntime().allocate_pinned(4096)
    assert taken == [True]
    assert not is_taken(tmp_path)


def test_a_child_forked_during_a_turn_does_not_prolong_it(driver, tmp_path):
    """A data loader worker has all files of its parent. Guards: the explicit unlock."""
    children = []

    def fork(pointer, num_bytes):
        children.append(os.fork())
        if children == [0]:
            signal.pause()
            os._exit(0)

    driver.on_register = fork
    AcceleratorRuntime().allocate_pinned(4096)
    try:
        assert not is_taken(tmp_path)
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


def test_a_rank_that_is_killed_in_its_turn_does_not_keep_it(driver, tmp_path):
    code = f"""
import tempfile, time
tempfile.tempdir = {str(tmp_path)!r}
from titan_offload.pinned_memory import one_rank_at_a_time
with one_rank_at_a_time():
    print("mine", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout.readline() == "mine\n"
        assert is_taken(tmp_path)
        rank.kill()
        rank.wait()
    AcceleratorRuntime().allocate_pinned(4096)
    assert not is_taken(tmp_path)


@pytest.mark.parametrize("fault", ["no folder", "no temporary folder at all", "not ours", "no locks"])
def test_without_a_lock_memory_is_pinned_all_the_same(driver, monkeypatch, tmp_path, fault):
    def refuse(error):
        def call(*args):
            raise error

        return call

    match fault:
        case "no folder":
            monkeypatch.setattr(pinned_memory.tempfile, "gettempdir", lambda: str(tmp_path / "none"))
        case "no temporary folder at all":
            monkeypatch.setattr(pinned_memory.tempfile, "gettempdir", refuse(FileNotFoundError("no usable folder")))
        case "not ours":
            monkeypatch.setattr(pinned_memory.os, "open", refuse(PermissionError("not ours")))
        case "no locks":
            monkeypatch.setattr(pinned_memory.fcntl, "flock", refuse(OSError(errno.ENOLCK, "No locks available")))
    num_files = len(os.listdir("/proc/self/fd"))
    assert AcceleratorRuntime().allocate_pinned(4096).numel() == 4096
    assert driver.log == [("register", 4096, PORTABLE), ("synchronize",), ("unregister", 4096)]
    assert len(os.listdir("/proc/self/fd")) == num_files


def test_the_lock_writes_to_nothing_that_somebody_put_there(driver, tmp_path):
    """Guards: O_NOFOLLOW, and that the file is not truncated."""
    precious = tmp_path / "precious"
    precious.write_text("data")
    path = tmp_path / f"titan_offload_pin_{os.getuid()}.lock"
    path.symlink_to(precious)
    AcceleratorRuntime().allocate_pinned(4096)
    assert (path.is_symlink(), precious.read_text()) == (True, "data")
    path.unlink()
    path.symlink_to(tmp_path / "new")
    AcceleratorRuntime().allocate_pinned(4096)
    assert not (tmp_path / "new").exists()
    path.unlink()
    path.write_text("data")
    AcceleratorRuntime().allocate_pinned(4096)
    assert path.read_text() == "data"
