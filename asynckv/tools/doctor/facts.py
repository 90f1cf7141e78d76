"""Facts about a host: plain values. The defaults are those of a machine without faults."""

from __future__ import annotations

from msgspec import Struct, field

from asynckv.version import VERSION


class Machine(Struct, frozen=True, kw_only=True):
    """Processor, memory, limits and permissions of this process.

    A `cpu_quota`, `memory_limit` or `shm_bytes` of 0 says that there is none. `throttled` is the share of its periods
    in which the control group was held up. Errors are empty where nothing was wrong.
    """

    kernel: str = "6.1"
    cpu: str = ""
    cores_present: int = 16
    cores_allowed: int = 16
    cpu_quota: float = 0.0
    throttled: float = 0.0
    load: float = 0.1
    numa_nodes: int = 1
    memory_bytes: int = 64 << 30
    memory_limit: int = 0
    memory_used: int = 0
    huge_pages: str = "madvise"
    shmem_huge_pages: str = "advise"
    shm_bytes: int = 32 << 30
    shm_free: int = 32 << 30
    shm_use: str = ""  # what is free there, and who holds the rest, if that is more than half
    nofile: int = 65_536
    memlock: int = -1  # without a limit
    ptrace_scope: int = 0
    seccomp: bool = False
    container: str = ""
    own_pid_namespace: bool = False
    uid: int = 1000
    cma_error: str = ""
    child_error: str = ""
    clocksource: str = "tsc"


class Interface(Struct, frozen=True, kw_only=True):
    name: str
    mtu: int = 1500
    addresses: tuple[str, ...] = ()
    is_loopback: bool = False


class Rdma(Struct, frozen=True, kw_only=True):
    name: str
    state: str = "ACTIVE"
    rate: str = ""
    usable: bool = True


class Network(Struct, frozen=True, kw_only=True):
    """Interfaces and names. `hostname_addresses` is what this host's own name resolves to."""

    hostname: str = "host"
    hostname_addresses: tuple[str, ...] = ("10.0.0.1",)
    interfaces: tuple[Interface, ...] = (
        Interface(name="lo", mtu=65_536, addresses=("127.0.0.1",), is_loopback=True),
        Interface(name="eth0", addresses=("10.0.0.1",)),
    )
    rdma: tuple[Rdma, ...] = ()


class Gpu(Struct, frozen=True, kw_only=True):
    """NVIDIA GPUs, as the driver lists them. `peermem`: the network card may read their memory by `nvidia_peermem`."""

    count: int = 0
    driver: str = ""
    peermem: bool = False


class Software(Struct, frozen=True, kw_only=True):
    """Installed software: NIXL's packages for CUDA versions, the one that asynckv loads, and the environment."""

    asynckv: str = VERSION
    python: str = "3.11.7"
    nixl: str = "1.5.1"
    variants: dict[str, str] = field(default_factory=lambda: {"nixl_cu12": "1.5.1"})
    variant: str = "nixl_cu12"
    torch: str = ""
    torch_cuda: str = ""
    pyzmq: str = "27"
    libzmq: str = "4.3.5"
    curve: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    plugin_dir_error: str = ""


class Use(Struct, frozen=True, kw_only=True):
    """One line of the tables that UCX writes of what it used: how often, for which sizes, by which way."""

    count: int
    sizes: str
    how: str
    transport: str


class Ucx(Struct, frozen=True, kw_only=True):
    """Observations of NIXL and UCX by two processes of ours, or by one of ours and an engine's."""

    stage: str = "done"  # how far it came: `start`, `agent`, `connect`, `read`, `done`
    failure: str = ""  # how it ended before that: `refused`, `died`, `hung`; empty if it did not
    detail: str = ""
    version: str = "1.23.0"
    library: str = ""
    plugins: tuple[str, ...] = ("UCX", "POSIX")
    lanes: tuple[str, ...] = ("tcp/lo", "cma/memory")  # of the connection, such as `rc_mlx5/mlx5_0:1`
    # Methods by which remote memory was read.
    uses: tuple[Use, ...] = (Use(count=1, sizes="0..inf", how="zero-copy", transport="cma/memory"),)
    unknown: tuple[tuple[str, str], ...] = ()  # variables that UCX does not know, with what it takes them for
    unavailable: tuple[str, ...] = ()  # what UCX said of transports and devices that were asked for and are not there
    errors: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)  # what the data plane says of itself (`NixlPlane.describe`)
    wrong: int = 0
    seconds: float = 0.0


class PeerFacts(Struct, frozen=True, kw_only=True):
    """Results of talking to `--to`; fields that the other side does not tell are empty."""

    address: str
    stage: str = "done"  # how far it came: `resolve`, `connect`, `speak`, `hello`, `done`
    error: str = ""
    errno: int = 0
    has_key: bool = False
    has_keys: bool = False
    key_refusal: str = ""
    addresses: tuple[str, ...] = ("10.0.0.2",)
    local: str = "10.0.0.1"
    path_mtu: int = 1500
    mechanism: str = ""  # in the listener's greeting (`CURVE`, `NULL`); empty if it was not asked or spoke no ZMTP
    turned_away: bool = False  # the listener refused our key
    hung_up: bool = False  # it ended the connection before, or while, hands were shaken
    major: int = 1
    minor: int = 0
    our_minor: int = 0
    unwelcome: str = ""
    engine_id: str = ""
    rank: str = ""
    incarnation: str = ""
    layout: str = ""
    token_shards: tuple[tuple[int, int, int, int], ...] = ()  # group, size, rank and interleave of each share
    agent: str = ""
    memories: int = 0
    memory_bytes: int = 0
    memory_kinds: tuple[str, ...] = ()
    metadata_bytes: int = 0
    digest_ok: bool = True
    gauges: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    planes: dict[str, str] = field(default_factory=dict)  # what its data plane says of itself (`Engine.describe`)
    life: str = ""
    away_s: float = 0.0  # for how long its event loop was away at most
    ucx: Ucx | None = None


class Facts(Struct, frozen=True, kw_only=True):
    """All of it; what was not asked for is not there."""

    machine: Machine = field(default_factory=Machine)
    network: Network = field(default_factory=Network)
    gpu: Gpu = field(default_factory=Gpu)
    software: Software = field(default_factory=Software)
    posting_threads: int = 2
    ucx: Ucx | None = None
    peer: PeerFacts | None = None
