"""Memory that another process can map, and where that process is needed."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import subprocess
import sys
import tempfile
from multiprocessing import shared_memory as stdlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asynckv import BackendError, ConfigError, EngineConfig, NixlConfig, register_tensors, shared_memory, shared_tensor
from asynckv.edges import choice, transports
from asynckv.edges.nic.nixl import NixlPlane
from asynckv.edges.sharing import NotShared, Shares, _Mapping, _under, shm_use
from asynckv.edges.survivor.main import COLLISION
from asynckv.edges.survivor.process import ServingPlane
from asynckv.edges.torch import shared_zeros
from asynckv.geometry.layout import Memory
from asynckv.integrations.vllm.offload import region
from tests.engines import open_files

SIZE = 3 * mmap.PAGESIZE + 17


def address(buffer: Any) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def readable(share: Any, base: int, length: int) -> bytes:
    return os.pread(share[0], length, share[1] + base - share[2])


@pytest.mark.parametrize("kind", ["asynckv", "memfd", "file", "part of a file", "stdlib", "torch"])
def test_shared_memory_of_any_kind_is_found_by_its_file(kind: str, tmp_path: Path) -> None:
    keep: list[Any] = []
    match kind:
        case "asynckv":
            keep.append(shared_memory(SIZE))
            base = address(keep[0])
        case "memfd":
            fd = os.memfd_create("test")
            os.ftruncate(fd, SIZE)
            keep.append(mmap.mmap(fd, SIZE))
            os.close(fd)
            base = address(keep[0])
        case "file":
            with (tmp_path / "pool").open("w+b") as file:
                file.truncate(SIZE)
                keep.append(mmap.mmap(file.fileno(), SIZE))
            base = address(keep[0])
        case "part of a file":
            with (tmp_path / "pool").open("w+b") as file:
                file.truncate((1 << 20) + SIZE)
                keep.append(mmap.mmap(file.fileno(), SIZE, offset=1 << 20))
            base = address(keep[0])
        case "stdlib":
            keep.append(stdlib.SharedMemory(create=True, size=SIZE))
            base = address(keep[0].buf)
        case _:
            keep.append(torch.zeros(SIZE, dtype=torch.uint8).share_memory_())  # type: ignore[no-untyped-call]
            base = keep[0].data_ptr()
    inside = Memory(base + 5, SIZE - 10)
    ctypes.memmove(base + 5, b"here", 4)
    shares = Shares([inside, Memory(base, SIZE)])
    try:
        assert len(shares.fds) == len(shares.shares) == 1
        assert readable(shares.shares[0], base + 5, 4) == b"here"
    finally:
        shares.close()
        if kind == "stdlib":
            keep[0].unlink()


def test_descriptor_0_is_one_like_any_other() -> None:
    """A service may have closed its standard input."""
    code = (
        "import os; os.close(0)\n"
        "from asynckv import shared_memory\n"
        "from asynckv.edges.sharing import Shares\n"
        "from asynckv.geometry.layout import Memory\n"
        "import numpy as np\n"
        "memory = shared_memory(4096)\n"
        "os.open('/dev/null', os.O_RDONLY)\n"
        "pool = np.frombuffer(shared_memory(4096), np.uint8)\n"
        "os.close(0)\n"
        "assert Shares([Memory(pool.ctypes.data, pool.nbytes)]).fds == (0,)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_descriptor_is_left_open_whether_memory_is_shared_or_not() -> None:
    memory, private = shared_memory(SIZE), np.zeros(SIZE, np.uint8)
    before = open_files()
    Shares([Memory(address(memory), SIZE)]).close()
    with pytest.raises(NotShared):
        Shares([Memory(address(memory), SIZE), Memory(private.ctypes.data, SIZE)])
    assert open_files() <= before


def test_a_region_that_cannot_be_shared_is_named_with_its_remedy() -> None:
    private, nameless, shared = np.zeros(SIZE, np.uint8), mmap.mmap(-1, SIZE), shared_memory(SIZE)
    for memory, why in (
        (Memory(private.ctypes.data, SIZE), r"memory 1 \(12305 bytes\) is private to this process; allocate it"),
        (Memory(address(nameless), SIZE), r"neither a descriptor nor a path leads to it.*shared_memory\(num_bytes\)"),
        (Memory(address(shared), 1 << 46), r"memory 1 \(\d+ bytes\) is .*; allocate it"),
        (Memory(1 << 40, SIZE, "cuda"), r"memory 1 .* is cuda memory"),
    ):
        with pytest.raises(NotShared, match=why):
            Shares([Memory(address(shared), SIZE), memory])


@pytest.mark.parametrize("base", [0x1000, 0x2800])
def test_a_region_with_a_part_that_is_not_mapped_cannot_be_shared(base: int) -> None:
    around = [_Mapping(start, start + 0x1000, True, 0, (1, 1), "") for start in (0x1000, 0x3000)]
    with pytest.raises(NotShared, match="memory 0 is private"):
        list(_under(Memory(base, 0x4000 - base), around, "memory 0"))


def test_shared_memory_is_zero_writable_and_bounded_by_what_there_is() -> None:
    memory = shared_memory(SIZE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    assert tensor.shape == (SIZE,)
    assert not tensor.any()
    tensor += 1
    assert memory[:] == b"\x01" * SIZE
    for num_bytes in (0, -1, 1 << 63):
        with pytest.raises(ConfigError, match="num_bytes is"):
            shared_memory(num_bytes)
    with pytest.raises(BackendError, match="bytes of shared memory"):
        shared_memory(1 << 52)


def test_a_child_whose_addresses_are_taken_says_so_by_its_status() -> None:
    """Another may fare better: where libraries lie is chance."""
    code = (
        "import mmap, os, numpy as np\n"
        "from asynckv.edges.survivor.main import _map\n"
        "there = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)\n"
        "fd = os.memfd_create('x'); os.ftruncate(fd, 4096)\n"
        "_map([(fd, 0, there.ctypes.data, 4096)])\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        assert subprocess.run([sys.executable, "-c", code], cwd=folder, timeout=60).returncode == COLLISION


NONE = ()
MLX = ("mlx5_0", "mlx5_1")


@pytest.mark.parametrize(
    ("tls", "devices", "rdma", "is_local", "emulated"),
    [
        # All that UCX has: shared memory serves one host, TCP what is beyond.
        ("", "", NONE, True, False),
        ("", "", NONE, False, True),
        ("all", "", NONE, False, True),
        ("tcp,sm,self", "", NONE, True, False),
        ("tcp,cma", "", NONE, True, False),
        ("tcp,sm,self", "", NONE, False, True),
        # TCP alone is emulation wherever the peer is.
        ("tcp", "", NONE, True, True),
        ("tcp,self", "", NONE, True, True),
        ("tcp,cuda_copy", "", NONE, True, True),
        ("tcp", "lo", MLX, True, True),
        ("tcp", "", MLX, False, True),
        # Queues in shared memory carry messages only.
        ("posix,sysv,tcp", "", NONE, True, True),
        ("posix,sysv", "", NONE, True, True),
        ("posix,cma", "", NONE, True, False),
        ("sm,self", "", NONE, True, False),
        ("sm,self", "", NONE, False, False),
        ("^tcp", "", NONE, True, False),
        ("^sm,shm,cma,knem,xpmem", "", NONE, True, True),
        ("self", "", NONE, False, False),
        # RDMA reads in hardware, if it may be used.
        ("", "", MLX, False, False),
        ("rc,tcp", "", MLX, False, False),
        ("rc_mlx5,self", "", MLX, False, False),
        ("^tcp", "", MLX, False, False),
        ("^ib,rc,dc,ud,srd,gga", "", MLX, False, True),
        ("^ib", "", MLX, False, True),
        ("^rc", "", MLX, False, True),
        ("ud,tcp", "", MLX, False, True),
        ("ib,tcp", "", MLX, False, False),
        ("^cma", "", NONE, True, True),
        ("^sm", "", NONE, True, True),
        ("^posix,sysv", "", NONE, True, False),
        ("", "mlx5_1:1", MLX, False, False),
        ("", "all", MLX, False, False),
        ("", "eth0", MLX, False, True),
        ("", "eth0,mlx5_0:1", MLX, False, False),
    ],
)
def test_where_reads_are_emulated(
    tls: str, devices: str, rdma: tuple[str, ...], is_local: bool, emulated: bool
) -> None:
    assert transports.is_emulated(tls, devices, rdma, is_local=is_local) is emulated


@pytest.mark.parametrize(
    ("environment", "engine_config", "found"),
    [
        ({}, "", ""),
        ({"UCX_TLS": "tcp"}, "TLS=rc", "tcp"),
        ({"UCX_TLS": ""}, "TLS=rc", ""),
        ({}, "TLS=rc", "rc"),
        ({}, "TCP_TX_SEG_SIZE=64k,TLS=tcp,self,TCP_RX_SEG_SIZE=64k", "tcp,self"),
        ({}, "UCX_TLS=^ib,NET_DEVICES=lo", "^ib"),
        ({}, "MY_TLS=rc", ""),
    ],
)
def test_a_setting_of_ucx_is_the_environments_then_the_configurations(
    environment: dict[str, str], engine_config: str, found: str
) -> None:
    assert transports.ucx_setting("TLS", environment, {"engine_config": engine_config}) == found


@pytest.mark.parametrize(
    ("address", "local"),
    [("tcp://127.0.0.1:0", True), ("tcp://localhost:1", True), ("tcp://[::1]:1", True), ("tcp://127.9.9.9:*", True)]
    + [(f"tcp://{host}:1", False) for host in ("0.0.0.0", "*", "10.0.0.1", "[::]", "example.org", "127.example.org")],
)
def test_loopback_is_this_host_alone(address: str, local: bool) -> None:
    assert transports.is_loopback(address) is local


@pytest.mark.parametrize(
    ("process", "tls", "bind", "is_shared", "kind", "warns"),
    [
        ("auto", "", "tcp://127.0.0.1:0", True, NixlPlane, False),
        ("auto", "tcp", "tcp://127.0.0.1:0", True, ServingPlane, False),
        ("auto", "tcp", "tcp://127.0.0.1:0", False, NixlPlane, True),
        ("auto", "", "tcp://127.0.0.1:0", False, NixlPlane, False),
        ("auto", "", "tcp://0.0.0.0:0", True, ServingPlane, False),
        ("never", "tcp", "tcp://0.0.0.0:0", True, NixlPlane, False),
        ("serving", "", "tcp://127.0.0.1:0", True, ServingPlane, False),
    ],
)
def test_the_plane_is_chosen_by_configuration_transports_and_memory(
    monkeypatch: pytest.MonkeyPatch, process: Any, tls: str, bind: str, is_shared: bool, kind: type, warns: bool
) -> None:
    monkeypatch.setattr(choice, "rdma_devices", lambda: ())
    monkeypatch.setenv("UCX_TLS", tls)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    memory = np.frombuffer(shared_memory(SIZE), np.uint8) if is_shared else np.zeros(SIZE, np.uint8)
    config = EngineConfig(engine_id="x", bind=bind, allow_insecure=True, nixl=NixlConfig(process=process))
    said: list[str] = []
    plane = choice.choose_plane(config, [Memory(memory.ctypes.data, SIZE)], "x", said.append)
    assert type(plane) is kind
    assert ["asynckv.shared_memory(num_bytes)" in warning for warning in said] == [True] * warns


def test_what_is_no_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="process is 'sometimes'; it must be 'auto', 'serving' or 'never'"):
        NixlConfig(process="sometimes")  # type: ignore[arg-type]


def test_a_shared_tensor_is_like_one_of_zeros_and_another_process_can_map_it() -> None:
    tensor = shared_tensor((2, 3, 5), torch.bfloat16)
    assert torch.equal(tensor, torch.zeros(2, 3, 5, dtype=torch.bfloat16))
    assert shared_tensor([4]).dtype is torch.get_default_dtype()
    tensor[1] = 2.0
    layout = register_tensors({"0": tensor}, order=("block", "token", "dim"), block_size=3, num_blocks=2).layout
    shares = Shares(layout.memories)
    assert len(shares.fds) == 1
    shares.close()
    for wrong in ((), (0, 1), (2, -1), "ab", 7, (1 << 40, 1 << 40)):
        with pytest.raises(ConfigError):
            shared_tensor(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"dtype is 'int8'"):
        shared_tensor((1,), "int8")  # type: ignore[arg-type]


def test_what_an_engine_allocates_by_zeros_is_shared_where_that_is_asked_for() -> None:
    with shared_zeros():
        shared = [
            torch.zeros(SIZE, dtype=torch.int8, device=torch.device("cpu")),
            torch.zeros((4, SIZE)),
            torch.zeros(9),
        ]
        private = [torch.empty(SIZE), torch.zeros(0), torch.zeros(4, device="meta")]
        given = torch.ones(4)
        assert torch.zeros(4, out=given) is given
        assert torch.zeros(4, requires_grad=True).requires_grad
    assert not given.any()
    private.append(torch.zeros(SIZE))
    for tensor in shared:
        Shares([Memory(tensor.data_ptr(), tensor.nbytes)]).close()
        assert not tensor.any()
    assert [t.shape for t in shared] == [(SIZE,), (4, SIZE), (9,)]
    for tensor in (private[0], private[3]):
        with pytest.raises(NotShared, match=r"private to this process; .*asynckv\.shared_tensor"):
            Shares([Memory(tensor.data_ptr(), tensor.nbytes)])


DENIED = r"""
import ctypes, platform, struct, sys
number = {"x86_64": (0xC000003E, 310), "aarch64": (0xC00000B7, 270)}[platform.machine()][1] + int(sys.argv[1])
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | 1), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
if libc.prctl(22, 2, ctypes.byref(Program(len(steps), ctypes.addressof(code))), 0, 0):
    sys.exit(77)
from asynckv import EngineConfig, shared_memory
from asynckv.edges import choice, transports
from asynckv.geometry.layout import Memory
import numpy as np
memory = np.frombuffer(shared_memory(4096), np.uint8)
choice.rdma_devices = lambda: ()
plane = choice.choose_plane(EngineConfig(engine_id="x"), [Memory(memory.ctypes.data, 4096)], "x", print)
print(transports.has_cma(), type(plane).__name__)
"""


@pytest.mark.parametrize("number", [0, 1, 2], ids=["process_vm_readv", "process_vm_writev", "another"])
def test_where_a_sandbox_forbids_copies_between_processes_the_owner_is_protected(number: int) -> None:
    """By a real filter of system calls, such as containers have: UCX emulates reads then, on loopback as well."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = subprocess.run([sys.executable, "-c", DENIED, str(number)], capture_output=True, text=True, env=env)
    if done.returncode == 77:
        pytest.skip("this system takes no filter")
    assert done.stdout.split() == (["True", "NixlPlane"] if number == 2 else ["False", "ServingPlane"]), done.stderr


@pytest.mark.parametrize(
    ("scope", "privileges", "found"), [("0", "0", True), ("1", "0", True), ("2", "0", False), ("3", "80000", True)]
)
def test_yama_may_forbid_copies_without_a_filter(tmp_path: Path, scope: str, privileges: str, found: bool) -> None:
    yama, status = tmp_path / "yama", tmp_path / "status"
    yama.write_text(scope + "\n")
    status.write_text(f"Name:\tx\nCapEff:\t{privileges.zfill(16)}\n")
    assert transports.has_cma(yama, status) is found
    assert transports.has_cma(tmp_path / "none", status) is True


def test_a_full_memory_file_system_names_what_is_free_and_who_holds_it() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        sizes = {"left": 1 << 20, "open": 3 << 20, "mapped": 2 << 20, "small": 4096}
        for each, size in sizes.items():
            (folder / each).write_bytes(bytes(size))
        with (folder / "open").open("r+b") as named, (folder / "mapped").open("r+b") as nameless:
            held = mmap.mmap(named.fileno(), sizes["open"]), mmap.mmap(nameless.fileno(), sizes["mapped"])
        (folder / "mapped").unlink()  # its memory stays in use
        free, _, files = shm_use(folder).partition("; its largest files: ")
        assert re.fullmatch(rf"\d+ of \d+ bytes of {folder} are free", free)
        me = f"{os.getpid()} ({Path('/proc/self/comm').read_text().strip()})"
        assert files.split("; ") == [
            f"{folder}/open, {3 << 20} bytes, held by {me}",
            f"{folder}/mapped (deleted), {2 << 20} bytes, held by {me}",
            f"{folder}/left, {1 << 20} bytes, held by no process seen",
        ]
        for piece in held:
            piece.close()


HOLDER = """
import mmap, sys
file = open(sys.argv[1], "r+b")
held = mmap.mmap(file.fileno(), 0)
open("/proc/self/comm", "wb").write(b"\\xff\\x1b[2J")
print(flush=True)
sys.stdin.read()
"""


def test_names_that_other_users_chose_neither_break_nor_colour_the_error() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        path = os.fsencode(name) + b"/a\r\x0b\xc2\x85\xe2\x80\xa8\n\xff\x1b[2J"
        Path(os.fsdecode(path)).write_bytes(bytes(1 << 20))
        holder = [sys.executable, "-c", HOLDER, os.fsdecode(path)]
        with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            child.stdout.readline()
            said = shm_use(Path(name))
            child.communicate()
        assert said.isprintable()
        assert f"held by {child.pid} (" in said


def test_memory_that_an_offload_cannot_have_names_the_holders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "FOLDER", tmp_path)
    held = tmp_path / "held"
    held.write_bytes(bytes(1 << 20))
    with pytest.raises(BackendError, match=rf"cannot be had in {tmp_path} .* are free; its largest files: {held}, "):
        region.Region("e", region.Shape(1 << 40, 1, 1, 1 << 14))
    assert list(tmp_path.iterdir()) == [held], "its own file is gone"
