"""All findings that there can be: how bad each is, why it matters, and what to do about it.

`docs/doctor.md` lists them from here (`python -m asynckv.diagnose.doctor.catalogue` prints its table).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec import Struct

__all__ = ["KINDS", "LEVELS", "TOPICS", "Finding", "Level", "finding", "table"]

Level = Literal["error", "warning", "note", "good"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note", "good")
"""The worst first."""

TOPICS = {
    "nixl": "NIXL and UCX",
    "speed": "Speed",
    "peer": "The other side",
    "memory": "Processes and shared memory",
    "limits": "Limits and CPU",
    "network": "Network and addresses",
    "keys": "Keys",
    "software": "Versions",
}


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that was found.

    Attributes:
        code: Its name in the catalogue.
        found: What was seen, with numbers.
        remedy: A command or a setting; empty where nothing is wrong.
        link: Where the documentation says more.
    """

    code: str
    level: Level
    topic: str
    title: str
    found: str
    why: str
    remedy: str
    link: str


class Kind(NamedTuple):
    """One kind of finding."""

    topic: str
    level: Level
    title: str
    why: str
    remedy: str
    link: str


def finding(code: str, found: str, *, remedy: str = "", level: Level | None = None) -> Finding:
    """Make a finding of a kind; what is known better here than in the catalogue takes its place."""
    kind = KINDS[code]
    return Finding(
        code=code,
        level=level or kind.level,
        topic=kind.topic,
        title=kind.title,
        found=found,
        why=kind.why,
        remedy=remedy or kind.remedy,
        link=kind.link,
    )


TWO_HOSTS, DEPLOY, SECURITY, RELIABILITY = (
    "docs/two_hosts.md",
    "docs/deploy.md",
    "docs/security.md",
    "docs/reliability.md",
)
PERFORMANCE, EMBEDDING, DOCTOR = "docs/performance.md", "docs/embedding.md", "docs/doctor.md"
DEVICES, LIMITS, CMA = (
    f"{DEPLOY}#which-devices-ucx-uses",
    f"{DEPLOY}#limits",
    f"{DEPLOY}#process_vm_readv-ptrace-and-seccomp",
)
SHM, PORTS, DIES = f"{DEPLOY}#shared-memory", f"{DEPLOY}#ports", f"{RELIABILITY}#what-dies-inside-ucx-when-a-peer-does"
KEYS, CPU, UPGRADES = f"{SECURITY}#how-to-deploy", f"{DEPLOY}#cpu-and-numa", f"{DEPLOY}#rolling-upgrades"
FAILS = f"{TWO_HOSTS}#6-when-it-does-not-work"
SLOW = f"{TWO_HOSTS}#5-when-it-is-slow"

KINDS: dict[str, Kind] = {
    # -- NIXL and UCX ----------------------------------------------------------------------------------
    "nixl-missing": Kind("nixl", "error", "NIXL is not installed", "It carries all bytes.", "pip install nixl", DEPLOY),
    "nixl-plugins": Kind(
        "nixl",
        "error",
        "NIXL finds no plug-ins",
        "Without the plug-in UCX no agent can be made.",
        "unset NIXL_PLUGIN_DIR, or let it name the folder that holds libplugin_UCX.so",
        DEVICES,
    ),
    "nixl-refused": Kind(
        "nixl",
        "error",
        "No NIXL agent can be made",
        "An engine would not start here.",
        "see what UCX says, and run again with the UCX_ variables unset",
        FAILS,
    ),
    "nixl-died": Kind(
        "nixl",
        "error",
        "A process that used NIXL died",
        "It was a process of doctor's own. Inside an engine it would have ended the engine.",
        'look at the last words; NixlConfig(process="always") keeps an engine alive when its NIXL dies',
        DIES,
    ),
    "nixl-hung": Kind(
        "nixl",
        "error",
        "NIXL hangs",
        "A read that never ends holds its blocks until they are retired.",
        "look at the stage where it stopped; a firewall on this host may drop UCX's ports, or the machine is too busy",
        FAILS,
    ),
    "ucx-no-transport": Kind(
        "nixl",
        "error",
        "UCX has no transport to send with",
        "Beside any transport that copies, UCX needs one that notices dead peers (TCP or RDMA).",
        "unset UCX_TLS, or add tcp to it; unset UCX_NET_DEVICES, or name a device that UCX lists",
        DEVICES,
    ),
    "ucx-unavailable": Kind(
        "nixl",
        "warning",
        "UCX does not have what it was told to use",
        "UCX goes on without it: more slowly, or not at all.",
        "correct UCX_TLS or UCX_NET_DEVICES to what UCX lists",
        DEVICES,
    ),
    "ucx-variable": Kind(
        "nixl",
        "warning",
        "UCX does not know a variable",
        "UCX only warns and ignores it, so the setting has no effect.",
        "correct its name, or unset it",
        DEVICES,
    ),
    "ucx-value": Kind(
        "nixl",
        "error",
        "UCX refuses a value",
        "No agent can be made.",
        "correct or unset the variable",
        DEVICES,
    ),
    "ucx-complains": Kind(
        "nixl", "note", "UCX complains", "It may explain what is slow or fails.", "see UCX_LOG_LEVEL=info", SLOW
    ),
    "reads-rdma": Kind("nixl", "good", "Reads go by RDMA", "The owner's CPU does no work for it.", "", DEVICES),
    "reads-cma": Kind(
        "nixl", "good", "Reads within this host go by CMA", "One copy by the kernel (process_vm_readv).", "", CMA
    ),
    "reads-memory": Kind(
        "nixl",
        "note",
        "Reads within this host go through shared memory",
        "Without CMA the owner's process has to answer. That needs its CPU, and it can die when a reader does.",
        "let UCX use CMA (UCX_TLS unset)",
        DIES,
    ),
    "reads-emulated": Kind(
        "nixl",
        "warning",
        "Reads within this host go by TCP, emulated",
        "The owner's process sends every byte: it costs CPU on both sides, and UCX can end it when a reader dies.",
        "allow process_vm_readv, leave cma in UCX_TLS, and keep both ranks in one PID namespace",
        CMA,
    ),
    "reads-emulated-asked": Kind(
        "nixl",
        "note",
        "Reads within this host go by TCP, as UCX_TLS says",
        "The owner's process sends every byte: it costs CPU on both sides, and UCX can end it when a reader dies.",
        "unset UCX_TLS, unless it is set on purpose",
        DIES,
    ),
    "process-unforeseen": Kind(
        "nixl",
        "warning",
        'process="auto" would not protect an engine here',
        "By the settings asynckv expects CMA, but reads are emulated: an engine that lends can die with its reader.",
        'NixlConfig(process="serving"), with shared KV memory (asynckv.shared_memory)',
        f"{DEPLOY}#the-process-that-may-die",
    ),
    "error-mode-none": Kind(
        "nixl",
        "warning",
        "Peers that die would not be noticed",
        "With ucx_error_handling_mode=none UCX watches no connection. It does not keep the owner from dying either.",
        "leave ucx_error_handling_mode out of NixlConfig.params",
        SHM,
    ),
    "tcp-segments": Kind(
        "nixl",
        "warning",
        "TCP segments are small",
        "With UCX's default of 8 KiB TCP reaches less than half its rate. asynckv sets 64k, but the environment wins.",
        "unset UCX_TCP_TX_SEG_SIZE and UCX_TCP_RX_SEG_SIZE, or give 64k",
        TWO_HOSTS,
    ),
    "rendezvous": Kind(
        "nixl",
        "warning",
        "UCX_RNDV_THRESH is set",
        "With 64k over TCP a fifth of the bandwidth was measured.",
        "unset UCX_RNDV_THRESH",
        SLOW,
    ),
    "proto-off": Kind(
        "nixl",
        "error",
        "UCX_PROTO_ENABLE=n",
        "Without its protocols UCX moves no bytes at all.",
        "unset UCX_PROTO_ENABLE",
        DIES,
    ),
    "telemetry-port": Kind(
        "nixl",
        "warning",
        "NIXL's Prometheus exporter takes one port per process",
        "The second process of a host finds the port taken, logs one line, and has no telemetry.",
        "unset NIXL_TELEMETRY_EXPORTER, or use prometheus_mp",
        PERFORMANCE,
    ),
    "completions": Kind(
        "nixl",
        "note",
        "Completions have to be polled for",
        "UCX's file descriptors were not found, so the loop polls while a transfer runs.",
        "report it with UCX's version",
        PERFORMANCE,
    ),
    "ucx-elsewhere": Kind(
        "nixl",
        "note",
        "UCX is not the one of NIXL's wheel",
        "LD_LIBRARY_PATH or another package brought it. NIXL was built and measured with its own.",
        "unset LD_LIBRARY_PATH and LD_PRELOAD, unless they are set on purpose",
        DOCTOR,
    ),
    "gpu-transports": Kind(
        "nixl",
        "warning",
        "UCX_TLS leaves out the GPU transports",
        "GPU memory cannot be registered, or is copied through the host.",
        "unset UCX_TLS, or add cuda to it",
        DEVICES,
    ),
    # -- speed -----------------------------------------------------------------------------------------
    "speed": Kind("speed", "good", "Reads are as fast as can be expected", "", "", PERFORMANCE),
    "slow-bulk": Kind(
        "speed",
        "warning",
        "Large reads are slow",
        "Normal is 0.6 of a copy within memory over CMA, and 0.8 of a raw stream over TCP.",
        "look at the findings of load and CPU limits; run again on a quiet machine",
        SLOW,
    ),
    "slow-small": Kind(
        "speed",
        "warning",
        "Small reads are slow",
        "A read of 4 KiB takes tens of microseconds. More means a busy machine, or an owner that is not woken.",
        "look at the findings of load and CPU limits; run again on a quiet machine",
        SLOW,
    ),
    "wrong-bytes": Kind(
        "speed",
        "error",
        "Reads returned wrong bytes",
        "This must not happen.",
        "report it with the output of --json",
        RELIABILITY,
    ),
    "noisy": Kind(
        "speed",
        "note",
        "The figures differ from round to round",
        "Then they mean little.",
        "run again on a quiet machine",
        PERFORMANCE,
    ),
    # -- processes and shared memory -------------------------------------------------------------------
    "cma": Kind("memory", "good", "process_vm_readv is allowed", "UCX can read within the host by CMA.", "", CMA),
    "cma-forbidden": Kind(
        "memory",
        "warning",
        "process_vm_readv is forbidden",
        "UCX then reads within this host by emulated TCP: a quarter of the speed, and the owner can die with a reader.",
        "let the seccomp profile allow process_vm_readv and process_vm_writev, and run all ranks as one user",
        CMA,
    ),
    "ptrace-scope": Kind(
        "memory",
        "warning",
        "Yama restricts ptrace",
        "With 2, CMA needs CAP_SYS_PTRACE; with 3, it is forbidden.",
        "sysctl kernel.yama.ptrace_scope=1 on the host",
        CMA,
    ),
    "no-child": Kind(
        "memory",
        "warning",
        "NIXL cannot have a process of its own here",
        "Where reads are emulated, an engine that lends can die with its reader.",
        "allow pidfd_open (seccomp), and use an interpreter that knows its path",
        f"{DEPLOY}#the-process-that-may-die",
    ),
    "pid-namespace": Kind(
        "memory",
        "note",
        "This process has a PID namespace of its own",
        "Two pods of one host read by TCP or RDMA, not by CMA.",
        "put ranks that should read by CMA into one pod",
        DEVICES,
    ),
    "shm-none": Kind(
        "memory",
        "note",
        "There is no /dev/shm",
        "asynckv and UCX need none, but torch's share_memory_() and vLLM do.",
        "mount a tmpfs at /dev/shm",
        SHM,
    ),
    "shm-small": Kind(
        "memory",
        "warning",
        "/dev/shm is small",
        "asynckv and UCX need none, but KV memory of torch's share_memory_() has to fit, and vLLM and NCCL need some.",
        "docker run --shm-size=16g, or an emptyDir with medium: Memory at /dev/shm",
        SHM,
    ),
    "shm-full": Kind(
        "memory",
        "warning",
        "/dev/shm is nearly full",
        "The next process that writes to it may be killed by SIGBUS.",
        "remove files that dead processes left in /dev/shm",
        SHM,
    ),
    "huge-pages": Kind(
        "memory",
        "note",
        "Shared memory gets no huge pages",
        "CMA is a quarter faster on them.",
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        LIMITS,
    ),
    "memory-limit": Kind(
        "memory",
        "warning",
        "The memory of this control group is nearly used up",
        "Shared KV memory and the data plane's process count towards it. At the limit the kernel kills.",
        "raise the limit (docker run --memory, resources.limits.memory)",
        LIMITS,
    ),
    # -- limits and CPU ----------------------------------------------------------------------------------
    "nofile": Kind(
        "limits",
        "warning",
        "Few open files are allowed",
        "A rank that listens has 40 open, and 4 more for each rank of the other side.",
        "ulimit -n 65536",
        LIMITS,
    ),
    "memlock": Kind(
        "limits",
        "error",
        "Locked memory is limited, and there is RDMA",
        "RDMA pins all registered memory: registering the KV cache fails, or UCX falls back to TCP.",
        "ulimit -l unlimited; in a container IPC_LOCK and --ulimit memlock=-1",
        LIMITS,
    ),
    "one-core": Kind(
        "limits",
        "warning",
        "This process may use one core",
        "The engine's loop, its posting threads and the inference engine wait for each other.",
        "give the process two cores or more (taskset, cpuset, resources.limits.cpu)",
        CPU,
    ),
    "throttled": Kind(
        "limits",
        "warning",
        "The control group is throttled",
        "It looks like a network that stalls.",
        "raise the CPU limit, or leave it out and use exclusive cores",
        CPU,
    ),
    "cpu-quota": Kind(
        "limits",
        "note",
        "A CPU limit below the cores that are seen",
        "More threads than that are started, and the group is throttled when all run.",
        "use whole exclusive cores",
        CPU,
    ),
    "busy": Kind(
        "limits",
        "note",
        "The machine is busy",
        "The rates of this run are too low.",
        "run again on a quiet machine",
        CPU,
    ),
    "numa": Kind(
        "limits",
        "note",
        "There are several NUMA nodes, and none is chosen",
        "Memory and network cards of another node are slower.",
        "numactl --cpunodebind=N --membind=N, N being the node of the network card",
        CPU,
    ),
    "clocksource": Kind(
        "limits",
        "warning",
        "Reading the clock is slow",
        "Each event reads it. With this source that takes a microsecond instead of 30 ns.",
        "boot with clocksource=tsc, if the machine has one that is stable",
        CPU,
    ),
    "clock-unsynchronised": Kind(
        "limits",
        "note",
        "The wall clock is not synchronised",
        "asynckv compares no clocks, but logs of several hosts are easier to join if they agree.",
        "run chrony or another NTP client on the host",
        f"{DOCTOR}#clocks",
    ),
    # -- network and addresses ---------------------------------------------------------------------------
    "only-loopback": Kind(
        "network",
        "note",
        "No network but loopback",
        "No other host reaches an engine here.",
        "give the container a network",
        PORTS,
    ),
    "many-devices": Kind(
        "network",
        "note",
        "UCX listens on several devices",
        "Without UCX_NET_DEVICES it takes all that it finds, those of containers as well.",
        "export UCX_NET_DEVICES=... to name the device of the data network",
        DEVICES,
    ),
    "small-mtu": Kind(
        "network",
        "note",
        "Small packets",
        "They cost more CPU per byte.",
        "raise the MTU on the whole path (9000 in a data centre)",
        FAILS,
    ),
    "hostname-loopback": Kind(
        "network",
        "note",
        "This host's name resolves to loopback only",
        "If an engine advertises this name, other hosts connect to themselves (Debian's /etc/hosts has 127.0.1.1).",
        "advertise an address instead of the name, or correct /etc/hosts",
        PORTS,
    ),
    "rdma": Kind("network", "good", "RDMA devices", "", "", DEVICES),
    "rdma-unusable": Kind(
        "network",
        "warning",
        "RDMA devices cannot be used",
        "UCX falls back to TCP silently.",
        "pass /dev/infiniband into the container and let this user open uverbs*; see ibstat for ports that are down",
        DEVICES,
    ),
    "gpu-peermem": Kind(
        "network",
        "note",
        "GPUs and RDMA without nvidia_peermem",
        "The network card reads GPU memory by nvidia_peermem, or by dmabuf where there is such; else it "
        "is copied through the host.",
        "modprobe nvidia_peermem",
        DEVICES,
    ),
    "listen-refused": Kind(
        "network",
        "error",
        "An engine would refuse to listen with these settings",
        "It would not start.",
        "see what it says",
        PORTS,
    ),
    "bind-fails": Kind(
        "network",
        "error",
        "Nothing can listen there",
        "The engine would not start.",
        "choose an address of this host, and a port that is free (0 lets the system choose)",
        PORTS,
    ),
    "bind-loopback": Kind(
        "network",
        "note",
        "Only this host can reach the engine",
        "That is right for ranks on one host.",
        'bind="tcp://0.0.0.0:0" and advertise="tcp://ADDRESS:0", with keys, to be reached from others',
        PORTS,
    ),
    "advertise-loopback": Kind(
        "network",
        "error",
        "The advertised address leads every host to itself",
        "Readers on other hosts connect to themselves and time out.",
        "advertise an address that the others reach",
        PORTS,
    ),
    "advertise-foreign": Kind(
        "network",
        "note",
        "The advertised address is not one of this host",
        "Behind a forwarded port it is right; but UCX's own addresses are not translated: no data flows through NAT.",
        "advertise an address of this host",
        PORTS,
    ),
    "ucx-ports": Kind(
        "network",
        "note",
        "UCX chooses the ports that it listens on",
        "If a firewall or NetworkPolicy opens only the control port, nobody can read.",
        "export UCX_TCP_PORT_RANGE=20000-20100 on both sides, and open it",
        PORTS,
    ),
    "ucx-few-ports": Kind(
        "network",
        "warning",
        "UCX_TCP_PORT_RANGE is narrow",
        "Each agent takes one port per device: the loop's agent, one per posting thread, and the serving process's.",
        "UCX_TCP_PORT_RANGE=20000-20100",
        PORTS,
    ),
    "insecure": Kind(
        "network",
        "warning",
        "Anybody may claim and release blocks",
        "There are no keys, and the port is open beyond loopback.",
        "asynckv keygen NAME, and KeysConfig",
        KEYS,
    ),
    # -- keys ----------------------------------------------------------------------------------------------
    "keys": Kind("keys", "good", "The keys can be used", "", "", KEYS),
    "key-rights": Kind(
        "keys",
        "error",
        "Others can read the secret key",
        "Whoever reads it can pose as this engine.",
        "chmod 600 FILE",
        KEYS,
    ),
    "key-bad": Kind(
        "keys", "error", "The secret key cannot be used", "The engine would not start.", "asynckv keygen NAME", KEYS
    ),
    "key-owner": Kind(
        "keys",
        "warning",
        "The secret key belongs to another user",
        "That user can replace it.",
        "chown it to the engine's user",
        KEYS,
    ),
    "authorized-bad": Kind(
        "keys",
        "error",
        "The authorized keys cannot be used",
        "The engine would not start.",
        "make the directory, and copy into it the .key file of every engine that this one talks to",
        KEYS,
    ),
    "own-key-unlisted": Kind(
        "keys",
        "note",
        "This engine's own key is not in its directory",
        "It need not be. But the same directory on the other hosts would keep this engine out.",
        "copy this engine's .key into the authorized directories of all others",
        KEYS,
    ),
    "zmq-no-curve": Kind(
        "keys",
        "error",
        "libzmq has no CURVE",
        "Keys cannot be used.",
        "pip install --force-reinstall pyzmq (its wheel has it)",
        KEYS,
    ),
    # -- versions --------------------------------------------------------------------------------------------
    "two-variants": Kind(
        "software",
        "note",
        "NIXL is installed for two CUDA versions",
        "Two in one process abort it. asynckv loads one, and import nixl loads the same.",
        "do nothing, unless something else in the process imports the other by name",
        DOCTOR,
    ),
    "variant-clash": Kind(
        "software",
        "warning",
        "NIXL is built for another CUDA than torch",
        "import nixl fails beside this torch, and two CUDA runtimes meet in one process.",
        "pip install nixl-cuN, N as in torch.version.cuda",
        DOCTOR,
    ),
    "nixl-mixed": Kind(
        "software",
        "warning",
        "NIXL's packages have different versions",
        "They are released together.",
        "pip install --upgrade --force-reinstall nixl",
        UPGRADES,
    ),
    "gpu-torch": Kind(
        "software",
        "warning",
        "There is a GPU, and torch has no CUDA",
        "KV memory on the GPU cannot be registered.",
        "install torch for CUDA",
        DOCTOR,
    ),
    # -- the other side ------------------------------------------------------------------------------------
    "to-name": Kind("peer", "error", "The name cannot be resolved", "", "correct the name, or use an address", FAILS),
    "to-wildcard": Kind(
        "peer",
        "error",
        "A wildcard is no address to connect to",
        "The engine that gave it advertises its bind address.",
        "set advertise there",
        PORTS,
    ),
    "to-port-zero": Kind(
        "peer",
        "error",
        "Port 0 is no port to connect to",
        "The system chose the real port when the engine bound it.",
        "take the address from engine.endpoint, or give the engine a fixed port",
        PORTS,
    ),
    "to-refused": Kind(
        "peer",
        "error",
        "Nothing listens there",
        "The host answers, but the port is closed: the engine is down, or on another port.",
        "start the engine, or correct the port",
        FAILS,
    ),
    "to-timeout": Kind(
        "peer",
        "error",
        "The address does not answer at all",
        "There is no answer and no refusal: a firewall drops packets, or the host is off.",
        "open the port in the firewall or NetworkPolicy; ping the host",
        PORTS,
    ),
    "to-no-route": Kind("peer", "error", "There is no route to that host", "", "see ip route get ADDRESS", FAILS),
    "to-not-zmq": Kind(
        "peer", "error", "Something else listens there", "It does not speak ZMQ's protocol.", "correct the port", FAILS
    ),
    "to-silent": Kind(
        "peer",
        "error",
        "The listener does not answer",
        "ZMQ answers, but asynckv does not: the process hangs, is stopped, or is another program.",
        "look at that process: py-spy dump, loop_was_away in its log",
        FAILS,
    ),
    "to-turned-away": Kind(
        "peer",
        "error",
        "The other side refuses our key",
        "Our public key is not in its authorized directory.",
        "copy our .key file into the authorized directory there; its log says `refused` with the key",
        f"{SECURITY}#what-you-see-and-what-it-means",
    ),
    "to-wrong-key": Kind(
        "peer",
        "error",
        "The listener does not have the key in the address",
        "The address is old, or another process took the port.",
        "take the address from engine.endpoint anew",
        f"{SECURITY}#what-you-see-and-what-it-means",
    ),
    "to-unlisted": Kind(
        "peer",
        "error",
        "The key in the address is not in our directory",
        "An engine with these keys would not talk to it.",
        "copy the other side's .key file into our authorized directory",
        f"{SECURITY}#what-you-see-and-what-it-means",
    ),
    "to-no-key": Kind(
        "peer",
        "error",
        "The address names no key, but we have keys",
        "The other engine runs without keys, or the part from # on was cut off.",
        "give the whole address, or leave --secret and --authorized out",
        f"{SECURITY}#what-you-see-and-what-it-means",
    ),
    "to-needs-keys": Kind(
        "peer",
        "error",
        "The other side requires keys",
        "It admits nobody without keys.",
        "give --secret and --authorized, and the address with its #key",
        f"{SECURITY}#what-you-see-and-what-it-means",
    ),
    "to-keyless": Kind(
        "peer",
        "error",
        "The other side runs without keys",
        "The address names a key, but the listener uses none.",
        "set EngineConfig.keys there, or take the address from engine.endpoint anew",
        f"{SECURITY}#what-you-see-and-what-it-means",
    ),
    "to-version": Kind(
        "peer",
        "error",
        "The other side speaks another protocol",
        "Different major versions do not work together.",
        "upgrade the older side",
        UPGRADES,
    ),
    "to-minor": Kind(
        "peer",
        "note",
        "Another minor version of the protocol",
        "They work together: nothing is sent that the older one does not know.",
        "upgrade the older side when it suits",
        UPGRADES,
    ),
    "to-unwelcome": Kind("peer", "error", "The engine serves no new readers", "", "see what it says", FAILS),
    "to-damaged": Kind(
        "peer",
        "error",
        "The metadata was damaged on its way",
        "Bad bytes can end the process that loads them, so they were not loaded.",
        "find out what changes packets on the way",
        RELIABILITY,
    ),
    "to-engine": Kind("peer", "good", "The engine answers", "", "", DOCTOR),
    "to-round-trip": Kind(
        "peer",
        "good",
        "Round trips of control packets",
        "A pull that was not announced waits for one round trip.",
        "",
        DOCTOR,
    ),
    "to-slow": Kind(
        "peer",
        "warning",
        "Control packets are slow or lost",
        "Claims and proofs wait for them. Readers give up a handshake after 5 s.",
        "look at the network, and at loop_was_away in the engine's log",
        f"{DEPLOY}#what-to-watch",
    ),
    "to-loopback": Kind(
        "peer",
        "note",
        "That address belongs to this host",
        "On other hosts it leads to themselves.",
        "advertise an address that the other hosts reach, if there are other hosts",
        PORTS,
    ),
    "to-name-loopback": Kind(
        "peer",
        "warning",
        "That name resolves to this host",
        "On the other host it may resolve to another one (Debian's /etc/hosts has 127.0.1.1).",
        "use an address, or correct /etc/hosts",
        PORTS,
    ),
    "to-mtu": Kind(
        "peer",
        "warning",
        "The path takes smaller packets than the device sends",
        "If the ICMP messages about that are dropped, large reads hang.",
        "set one MTU on the whole path; test it with ping -M do -s 8972 ADDRESS",
        FAILS,
    ),
    "to-data": Kind(
        "peer",
        "error",
        "Control works, data does not",
        "UCX could not open a connection to the other side's agent.",
        "open UCX's ports on both sides (UCX_TCP_PORT_RANGE=20000-20100), and name the device of the data network on "
        "both (UCX_NET_DEVICES)",
        FAILS,
    ),
    "to-rdma": Kind("peer", "good", "Reads from there go by RDMA", "The owner's CPU does no work for it.", "", DEVICES),
    "to-cma": Kind("peer", "good", "Reads from there go by CMA", "It is a process of this host.", "", CMA),
    "to-emulated": Kind(
        "peer",
        "note",
        "Reads from there go by TCP, emulated",
        "Both sides' CPU moves the bytes, and UCX can end the process that lends when a reader dies.",
        'share the KV memory there, so that process="auto" protects the engine; or use RDMA',
        DIES,
    ),
    "to-not-rdma": Kind(
        "peer",
        "warning",
        "RDMA is available here, but TCP is used",
        "The other side has none, or UCX may not use it there.",
        "run asynckv doctor there; look at UCX_TLS, UCX_NET_DEVICES and memlock on both",
        DEVICES,
    ),
    "to-speed": Kind("peer", "good", "Reads from there", "", "", TWO_HOSTS),
    "to-unmeasured": Kind(
        "peer",
        "note",
        "No bytes were read from there",
        "Doctor never reads an engine's blocks.",
        "to measure the path, run asynckv doctor --serve on that host, and --to its address here",
        TWO_HOSTS,
    ),
    "to-life": Kind(
        "peer",
        "note",
        "The engine takes nothing new",
        "Requests that are lent already can still be read.",
        "ask another engine, or wait until it has been restarted",
        f"{DEPLOY}#ending-a-pod",
    ),
    "to-away": Kind(
        "peer",
        "warning",
        "The engine's loop was away",
        "Meanwhile it answers nobody. Readers give up a handshake after 5 s, and a grant lasts lease.grant_s.",
        "give the engine its own thread and core (EngineThread)",
        CPU,
    ),
    "to-device": Kind(
        "peer",
        "error",
        "The other side offers its data on loopback only",
        "No other host can open a connection to it.",
        "set UCX_NET_DEVICES there to the device of the data network",
        FAILS,
    ),
    "to-error-mode": Kind(
        "peer",
        "warning",
        "The other side would not notice dead peers",
        "Its agent was made with ucx_error_handling_mode=none.",
        "leave ucx_error_handling_mode out of NixlConfig.params there",
        SHM,
    ),
    "to-versions": Kind(
        "peer",
        "warning",
        "The two sides have different versions",
        "NIXL decides which versions' metadata it loads, and refuses the rest.",
        "install the same versions on both",
        UPGRADES,
    ),
    "to-clock": Kind(
        "peer",
        "warning",
        "The wall clocks differ",
        "asynckv compares no clocks, but people read logs of both sides together.",
        "run chrony or another NTP client on both hosts",
        f"{DOCTOR}#clocks",
    ),
}


def table() -> str:
    """Write all kinds for the documentation: a table per topic."""
    lines = []
    for topic, title in TOPICS.items():
        lines += [f"### {title}", "", "| finding | why it matters | what to do |", "|---|---|---|"]
        for code, kind in KINDS.items():
            if kind.topic == topic:
                cells = (f"**{kind.level}** `{code}`: {kind.title}", kind.why, kind.remedy)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(), end="")
