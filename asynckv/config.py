"""The engine's configuration: frozen, checked once, with defaults that suit production.

Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from string import Formatter
from typing import Any, Literal, get_type_hints

from asynckv.arguments import MAX_INTEGER, MAX_NAME, did_you_mean, flag, integer, is_text, number, seconds, shown, text
from asynckv.errors import ConfigError

MAX_RETRIES = 1000
MAX_PATH = 4096
MAX_POSTING_THREADS = 16
COPY_THREADS, MAX_COPY_THREADS = 2, 16
MAX_BACKUPS = 1000
MAX_PACKING = 128 << 30  # 65,536 slots, as many as a handshake can tell
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FILE = ("engine_id", "rank", "pid", "host")
CORES_FOR_TWO = 2
POLICIES = ("s3-fifo", "lru")

MIN_GRANT_S = 0.5  # the shortest grant: a shorter one could lapse while its reader's loop is merely busy
MIN_HELD_FRACTION = 0.01
MAX_HELD_FRACTION = 1000.0

MIN_LEASE_S = 2.0  # the shortest lease: a shorter one could end between two renewals of a reader with a busy loop


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseConfig:
    """Times and limits of lent requests on a prefill rank.

    Attributes:
        lease_s: Seconds for which an unclaimed request stays lent; give it to `PrefillRanks(lease=...)`. Raise it if
            decode engines hear of requests late (a long queue at the router, no `Engine.announce`). Lower it if KV
            memory is scarce.
        grant_s: Length of one grant to a reader, at least 0.5 s. The reader renews it while it needs the blocks. It
            also bounds how long a dead reader holds blocks, and how long `Engine.aclose` takes. Raise it if a reader's
            event loop may be blocked for longer.
        max_lease_s: Longest time for which renewals keep a request lent. Raise it if requests wait longer in the decode
            engine's queue.
        parked_s: Seconds for which an early claim or release, of a request not lent yet, is remembered. Raise it if
            params reach the decode side long before the prefill ends.
        max_parked: Most early claims and releases that are remembered.
    """

    lease_s: float = 30.0
    grant_s: float = 10.0
    max_lease_s: float = 3600.0
    parked_s: float = 30.0
    max_parked: int = 4096

    def __post_init__(self) -> None:
        _positive(self)
        check_lease(self.lease_s, self.max_lease_s)
        if self.grant_s < MIN_GRANT_S:
            raise ConfigError(
                f"grant_s {self.grant_s} is below {MIN_GRANT_S:g} s: readers renew a promise three times while it "
                f"lasts, and a loop that is merely busy would miss it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PullConfig:
    """Deadlines, repetitions and limits of reads on a decode rank.

    Attributes:
        timeout_s: Deadline of a pull that names none, including its queue and its retries. At least 2 s. Raise it if
            the largest prompts take longer over the slowest network.
        announce_s: Seconds for which an announced request may wait for its pull, if `Engine.announce` names none. After
            that the engine gives it up, and it cannot be pulled any more. Give more than any request waits in the
            inference engine's queue.
        follow_s: Seconds for which a request may wait to be offered, if `Engine.follow` names none. Give more than any
            prompt waits and computes in a prefill engine, and more than the router's `--prefill-s`.
        handshake_s: Seconds that a remote rank may take to answer a handshake, and then to be loaded. Raise it if UCX
            connects slowly.
        hello_retry_s: Pause before an unanswered hello, the first message of a handshake, is repeated; it doubles.
        backoff_s: Pause after the first failed handshake; it doubles up to `max_backoff_s`.
        max_backoff_s: Longest pause between handshakes with an unreachable rank.
        claim_retry_s: Pause before an unanswered claim is repeated; it doubles up to 2 s.
        release_retry_s: Pause before an unanswered release is repeated; it doubles up to 5 s.
        release_timeout_s: Seconds after which an unanswered release is given up. The lease then ends by itself.
        drain_s: Longest time that a failed or cancelled pull waits for its running transfers. Its outcome then names
            blocks still in use as held.
        held_s: Seconds after the outcome for which a stuck transfer may hold a pull's blocks. The blocks are then
            retired: an error is logged, and waiting callers get `BlocksRetired`.
        heartbeat_s: Interval of pings to a silent peer that owes or holds something.
        suspect_s: Seconds of silence after which a peer gets no new work.
        gone_s: Seconds of silence after which a peer counts as dead, and its pulls fail. Raise it if a rank's event
            loop may be blocked for longer. `heartbeat_s` < `suspect_s` < `gone_s` must hold.
        idle_s: Seconds for which an unused peer stays connected.
        max_post_bytes: Most bytes in one read. Reads that wait for a posting thread may share a NIXL transfer of 8 MiB.
        max_post_descriptors: Most descriptors, after merging neighbours, in one read.
        window_bytes: Most bytes in flight per peer. A larger transfer goes alone. Raise it if the network's bandwidth
            times its latency is more: 400 Gbit/s and 1 ms are 50 MB.
        window_descriptors: Most descriptors in flight per peer.
        window_requests: Most pulls that read from one prefill engine at a time; more of them wait.
        total_bytes: Most bytes in flight from all peers. At least `window_bytes`.
        total_descriptors: Most descriptors in flight from all peers. At least `window_descriptors`.
        total_requests: Most pulls that read at a time. At least `window_requests`.
        max_queued: Most pulls that wait to read; one more is refused at once (`Overloaded`).
        retries: Number of retries of a failed pull within its deadline; 0 for none. 1 or 2 help over TCP.
        retry_s: Pause before the first retry; it doubles up to 2 s.
        second_look: Share of pulls that read a sample twice and compare it, from 0 (none) to 1 (all). This finds what
            writes into lent blocks, or blocks that are being filled, and transports that change bytes.
        second_look_bytes: Most bytes of this sample per rank, about (less if its pieces are small), or `all`.
    """

    timeout_s: float = 30.0
    announce_s: float = 300.0
    follow_s: float = 600.0
    handshake_s: float = 5.0
    hello_retry_s: float = 0.25
    backoff_s: float = 0.5
    max_backoff_s: float = 1.0  # a hello is some 100 bytes, and sent only while a request needs the rank
    claim_retry_s: float = 0.2
    release_retry_s: float = 0.2
    release_timeout_s: float = 30.0
    drain_s: float = 5.0
    held_s: float = 600.0
    heartbeat_s: float = 0.25
    suspect_s: float = 1.0
    gone_s: float = 15.0
    idle_s: float = 600.0
    max_post_bytes: int = 4 * 1024 * 1024
    max_post_descriptors: int = 512
    window_bytes: int = 32 * 1024 * 1024
    window_descriptors: int = 8192
    window_requests: int = 256
    total_bytes: int = 256 * 1024 * 1024
    total_descriptors: int = 65_536
    total_requests: int = 1024
    max_queued: int = 65_536
    retries: int = 0
    retry_s: float = 0.1
    second_look: float = 0.0
    second_look_bytes: int | Literal["all"] = 1024 * 1024

    def __post_init__(self) -> None:
        _positive(self, but=("retries",), besides=("second_look", "second_look_bytes"))
        _check(self, number, ["second_look"], 0, 1)
        try:
            if not isinstance(self.second_look_bytes, str) or self.second_look_bytes != "all":
                _check(self, integer, ["second_look_bytes"], 1, MAX_INTEGER)
        except ConfigError as exc:
            raise ConfigError(f"{exc}, or 'all'") from None
        if not 0 <= self.retries <= MAX_RETRIES:
            raise ConfigError(f"retries is {self.retries}; it must be 0 (off) to {MAX_RETRIES}")
        if self.timeout_s < MIN_LEASE_S:
            raise ConfigError(
                f"timeout_s {self.timeout_s} is below {MIN_LEASE_S:g} s, the shortest lease: a deadline that short "
                f"fails every pull that meets a busy loop; give a single pull a shorter one instead"
            )
        for what in ("bytes", "descriptors", "requests"):
            window, total = getattr(self, f"window_{what}"), getattr(self, f"total_{what}")
            if window > total:
                raise ConfigError(
                    f"window_{what} {window} is above total_{what} {total}: one peer could not use its window; raise "
                    f"total_{what} or lower window_{what}"
                )
        if not self.heartbeat_s < self.suspect_s < self.gone_s:
            raise ConfigError(
                f"heartbeat_s {self.heartbeat_s} < suspect_s {self.suspect_s} < gone_s {self.gone_s} must hold: "
                f"a peer is pinged before it is suspected, and suspected before it is given up"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Limits of one key, or without keys of one host (messages: of one connection). The excess is dropped and counted.

    Attributes:
        messages_per_s: Messages per second that are processed. A costly one counts as several, a malformed packet as a
            hundred.
        message_burst: Most messages at once after a silence.
        hellos_per_s: Handshakes and status questions per second that are answered, because answers are large. Raise it
            if many operators or dashboards ask one engine.
        hello_burst: Most handshakes and questions at once after a silence.
    """

    messages_per_s: float = 50_000.0
    message_burst: int = 50_000
    hellos_per_s: float = 64.0
    hello_burst: int = 256

    def __post_init__(self) -> None:
        _positive(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlConfig:
    """Settings of NIXL and UCX. The defaults are measured.

    Attributes:
        backend: NIXL back end.
        params: Parameters of the back end, in addition to asynckv's own, which set TCP segments of 64 KiB.
        posting_threads: Number of threads that post large reads, because a copy or a drained socket would block the
            event loop: 0 (post on the loop) to 16. "auto" is 2 if this process may use two cores or more, else 1, and
            uses them only while they are not much slower than the loop (a loop that never sleeps keeps Python's lock
            from them). Each thread has a NIXL agent with its own connections and its own registration of the memory.
            Give 0 to a prefill engine that never reads.
        bulk_bytes: Least size of a read that goes to a posting thread. Each descriptor counts as the longest of its
            table. Where a post is a copy (within a host), a quarter suffices for reads beside others.
        bulk_descriptors: Least number of descriptors, before NIXL merges them, of a read that goes to a posting thread.
        staging_bytes: Bytes of staging memory, divided among the posting threads, which have 1 MiB each at least. Where
            the two sides' memory orders share only small pieces, long runs are read into it and their pieces are
            copied to their places, if that is faster on this host. 0: never. Memory on GPUs is always read directly.
        packing_bytes: Bytes of memory for packed copies, 2 MiB to 128 GiB. Where a reader needs only small pieces of
            the blocks that this rank has lent, as one head of eight, this rank gathers them there, and the reader reads
            that copy. 0: never. Not for memory on GPUs.
        process: The part of NIXL that runs in a process of its own, which may die inside UCX without ending the engine;
            another one replaces it. "never": no part. "serving": the agent that remote readers reach; the start fails
            if the memory is not shared (`asynckv.shared_tensor`, `asynckv.shared_memory`). "auto": "serving" if the
            memory is shared and UCX has only TCP between hosts, or no CMA within this one, so that the agent can die;
            else "never".
        process_start_s: Seconds for which that process may make no progress before it serves. It usually takes one. On
            a busy host asynckv waits while the process uses CPU, up to ten times as long. After that the start fails
            with "serving"; with "auto" NIXL stays in the engine's process, with a warning.
        try_metadata: The peers that have their NIXL metadata loaded in a separate process first, because loading can
            end a process inside UCX. "auto": peers on other hosts without a key in their address. "always": all.
            "never": none. The process is started for the first such peer, and delays it by about a second.
    """

    backend: str = "UCX"
    params: dict[str, str] = field(default_factory=dict)
    posting_threads: int | str = "auto"
    bulk_bytes: int = 2 * 1024 * 1024
    bulk_descriptors: int = 256
    staging_bytes: int = 32 * 1024 * 1024
    packing_bytes: int = 64 * 1024 * 1024
    process: Literal["auto", "serving", "never"] = "auto"
    process_start_s: float = 30.0
    try_metadata: Literal["auto", "always", "never"] = "auto"

    def __post_init__(self) -> None:
        threads = self.posting_threads
        if not (isinstance(threads, str) and threads == "auto") and (
            type(threads) is not int or not 0 <= threads <= MAX_POSTING_THREADS
        ):
            raise ConfigError(
                f"posting_threads is {shown(threads)}; it must be 0 (post on the loop) to {MAX_POSTING_THREADS}, or "
                f"'auto'"
            )
        _check(self, integer, ("bulk_bytes", "bulk_descriptors"), 1, MAX_INTEGER)
        _check(self, integer, ["staging_bytes"], 0, MAX_INTEGER)
        _check(self, integer, ["packing_bytes"], 0, MAX_PACKING)
        text("backend", self.backend, MAX_NAME, 1, ConfigError)
        pairs = self.params.items() if isinstance(self.params, dict) else [(None, None)]
        if not all(is_text(each) for pair in pairs for each in pair):
            raise ConfigError(f"nixl.params is {shown(self.params)}; it must be a dict of str to str")
        check_choice("process", self.process, "auto", "serving", "never")
        check_choice("try_metadata", self.try_metadata, "auto", "always", "never")
        _check(self, seconds, ["process_start_s"])

    @property
    def num_posters(self) -> int:
        """Number of posting threads on this host."""
        if isinstance(self.posting_threads, int):
            return self.posting_threads
        return 2 if len(os.sched_getaffinity(0)) >= CORES_FOR_TWO else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Content and place of the log. Failures are always logged, with their history; successes are sampled.

    The next event counts the successes that were left out.

    Attributes:
        successes_per_s: Most successful requests logged per second; 0 for none. Raise it while you investigate.
        slow_s: Seconds after which a request counts as slow, and is logged with its history like a failure.
        slow_per_s: Most slow requests logged per second, so that the log does not slow a slow service further.
        away_s: Seconds for which the event loop may be blocked before a warning (`loop_was_away`): three at once, then
            one in ten seconds, and any that is much longer than the last.
        held_fraction: Fraction of a lease after which a warning names held requests, and again at each doubling: lent
            requests, and announcements and pulls that stay in one state. 0 for no warnings. Requests that wait for the
            same share one line, and there are at most a few lines in ten seconds.
        file: File to which the engine writes JSON lines, in addition to the application's logging; none if empty. The
            name may contain `{engine_id}`, `{rank}`, `{pid}` and `{host}`. No two processes may share a file.
        level: Lowest level in the file: `debug`, `info`, `warning` or `error`. The application sets the level of its
            own logging.
        max_bytes: Size at which a file is renamed and another one begun; 0 for never. A file that cannot be renamed
            grows up to the size of all files together.
        backups: Number of renamed files that are kept; the oldest one is removed.
    """

    successes_per_s: float = 10.0
    slow_s: float = 5.0
    slow_per_s: float = 10.0
    away_s: float = 1.0
    held_fraction: float = 1 / 3
    file: str | os.PathLike[str] = ""
    level: Literal["debug", "info", "warning", "error"] = "info"
    max_bytes: int = 64 * 1024 * 1024
    backups: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "file", _path("log.file", self.file, "or '' for none"))
        _check_log_file(str(self.file))
        check_choice("log.level", self.level, *LOG_LEVELS)
        _check(self, integer, ["max_bytes"], 0, MAX_INTEGER)
        _check(self, integer, ["backups"], 1, MAX_BACKUPS)
        _check(self, number, ("successes_per_s", "slow_per_s"), 0, 1e6)
        _check(self, seconds, ("slow_s", "away_s"))
        try:
            fraction = number("held_fraction", self.held_fraction, 0, MAX_HELD_FRACTION, ConfigError)
            if fraction:
                number("held_fraction", fraction, MIN_HELD_FRACTION, MAX_HELD_FRACTION, ConfigError)
        except ConfigError as exc:
            raise ConfigError(f"{exc} (of a request's lease), or 0 to warn of nothing") from None
        object.__setattr__(self, "held_fraction", fraction)


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectConfig:
    """Answers of a running engine to questions (`asynckv why`, `docs/why.md`).

    Attributes:
        enabled: True to answer. If false, the asker is told so.
        directory: Directory of this rank's socket for processes of this host and user, which then need neither address
            nor keys. Ranks may share it, and it is made if missing. No socket if empty.
    """

    enabled: bool = True
    directory: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "enabled", flag("inspect.enabled", self.enabled, ConfigError))
        _path("inspect.directory", self.directory, "or leave it out for no socket")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysConfig:
    """Keys of this engine, and of the engines that it talks to (`docs/security.md`).

    The files are read when the engine is made.

    Attributes:
        secret: This engine's own file, `NAME.key_secret` of `asynckv keygen NAME`. Only its user may be able to read
            it.
        authorized: Directory with the `*.key` files of all engines that this one talks to, whichever of the two
            connects. Added and removed files count for new connections, without a restart.
    """

    secret: str | os.PathLike[str]
    authorized: str | os.PathLike[str]

    def __post_init__(self) -> None:
        for name in ("secret", "authorized"):
            _path(f"keys.{name}", getattr(self, name), "asynckv keygen NAME makes keys", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one rank's engine.

    Attributes:
        engine_id: Name of the inference engine, the same on all of its ranks.
        bind: Address on which the control plane listens; port 0 lets the system choose. Give the host's address in the
            data network if other hosts read from this rank.
        advertise: Address that peers are told; the bound one if empty. Give it if peers reach this rank by another
            address, such as a service's name or a forwarded port.
        allow_insecure: True to listen beyond loopback without keys. Every host that reaches the address may then read
            KV.
        keys: Keys that authenticate and encrypt the control plane, on any address. Without keys it listens on loopback
            only.
        lease: Times and limits of lent requests, as a prefill rank.
        pull: Deadlines and limits of reads, as a decode rank.
        nixl: Settings of NIXL and UCX.
        log: Content and place of the log.
        limits: Limits of one connection.
        inspect: Answers to questions about this engine.
    """

    engine_id: str
    bind: str = "tcp://127.0.0.1:0"
    advertise: str = ""
    allow_insecure: bool = False
    keys: KeysConfig | None = None
    lease: LeaseConfig = field(default_factory=LeaseConfig)
    pull: PullConfig = field(default_factory=PullConfig)
    nixl: NixlConfig = field(default_factory=NixlConfig)
    log: LogConfig = field(default_factory=LogConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    inspect: InspectConfig = field(default_factory=InspectConfig)

    def __post_init__(self) -> None:
        flag("allow_insecure", self.allow_insecure, ConfigError)
        for name, kind in get_type_hints(EngineConfig).items():
            if not isinstance(value := getattr(self, name), kind):
                wanted = getattr(kind, "__name__", str(kind))
                raise ConfigError(f"{name} is {shown(value)}; it must be a {wanted}")
        if not 1 <= len(self.engine_id) <= MAX_NAME:
            raise ConfigError(f"engine_id has {len(self.engine_id)} characters; give it 1 to {MAX_NAME}")
        _check(self, text, ("engine_id", "bind", "advertise"), MAX_NAME, 0)
        for name in ("bind", "advertise"):
            value = getattr(self, name)
            if (value or name == "bind") and not value.startswith("tcp://"):
                raise ConfigError(f"{name} {value!r} is not an address such as tcp://127.0.0.1:0")
        if self.keys is not None and self.allow_insecure:
            raise ConfigError(
                "allow_insecure=True and keys were both given, and contradict each other: keys protect the control "
                "plane on any address; remove allow_insecure"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Blocks that a rank keeps in host memory and in files (`docs/offload.md`).

    Attributes:
        model: Everything that decides a prompt's KV except its tokens: the model's name, its revision, an adapter.
            Blocks that were stored under another name are not found, and stay in files until their room is needed.
        hash_tokens: Tokens per hash. Every block size must be a multiple of it. It cannot be checked: if hashes cover
            fewer tokens than it says, prompts seem to share more than they do, and get wrong KV.
        host_bytes: Host memory for blocks, taken when the offload starts.
        directory: Directory of files that keep blocks beyond the life of the process; no files if empty. Only one
            process at a time may use it. Each rank makes a directory of its own in it.
        file_bytes: Bytes of files, taken from the disk when the offload starts. Give it together with `directory`, or
            give neither.
        policy: Rule by which a full tier gives up blocks. "s3-fifo" is not emptied by a scan of prompts that come once;
            "lru" gives up the blocks that were unused for longest.
        max_bytes: Most bytes in motion at a time, for each of: stores, loads, from files, to files.
        max_post_bytes: Most bytes in one copy. A running copy cannot be stopped, so this bounds how long a cancelled
            request's blocks stay in use. Less than about 16 MiB costs speed, above all if other threads compute in
            Python, because each copy may then wait 5 ms.
        copy_threads: Threads that copy between the device's memory and the host tier. One is a little slower than
            `memcpy`, two are faster. Each takes a core while it copies.
        max_jobs: Most stores that wait or run, and most loads; one more is refused (`Overloaded`).
        timeout_s: Deadline of a load that names none. A store that has not begun to copy by then stores nothing, and
            one that copies has as long again. After that its outcome is told, and it still holds its blocks.
        held_s: Seconds after the outcome of a load or a store for which a stuck copy may hold its blocks. The blocks
            are then retired: an error is logged, and waiting callers get `BlocksRetired`.
        network: Address and keys of the host tier's own engine, which lends stored blocks (`Offload.lend`). It needs
            its own `engine_id`. Without it nothing is lent.
    """

    model: str
    hash_tokens: int
    host_bytes: int
    directory: str | os.PathLike[str] = ""
    file_bytes: int = 0
    policy: Literal["s3-fifo", "lru"] = "s3-fifo"
    max_bytes: int = 256 * 1024 * 1024
    max_post_bytes: int = 32 * 1024 * 1024
    copy_threads: int = COPY_THREADS
    max_jobs: int = 4096
    timeout_s: float = 30.0
    held_s: float = 600.0
    network: EngineConfig | None = None

    def __post_init__(self) -> None:
        at_least_1 = "hash_tokens", "host_bytes", "max_bytes", "max_post_bytes", "max_jobs"
        _check(self, text, ["model"], MAX_NAME, 1, under="offload.")
        _check(self, integer, at_least_1, 1, MAX_INTEGER, under="offload.")
        _check(self, integer, ["file_bytes"], 0, MAX_INTEGER, under="offload.")
        _check(self, integer, ["copy_threads"], 1, MAX_COPY_THREADS, under="offload.")
        _check(self, seconds, ("timeout_s", "held_s"), under="offload.")
        object.__setattr__(self, "directory", _path("offload.directory", self.directory, "or '' for no files"))
        if "\0" in str(self.directory):
            raise ConfigError(f"offload.directory is {shown(self.directory)}; give a path, which has no null byte")
        if bool(self.directory) != bool(self.file_bytes):
            raise ConfigError(
                f"offload.directory is {shown(self.directory)} and offload.file_bytes {self.file_bytes}; give both, or "
                f"neither for no files"
            )
        if self.network is not None and not isinstance(self.network, EngineConfig):
            raise ConfigError(f"offload.network is {shown(self.network)}; it must be an EngineConfig, or None")
        check_choice("offload.policy", self.policy, *POLICIES)


def _check(config: object, check: Callable[..., Any], names: Iterable[str], *bounds: float, under: str = "") -> None:
    """Check fields and keep the returned values, which are never numpy's types, because some of those cannot be
    sent."""
    for name in names:
        object.__setattr__(config, name, check(under + name, getattr(config, name), *bounds, error=ConfigError))


def check_choice(name: str, value: object, *choices: str) -> None:
    """Refuse a value that is none of the choices, and name all of them."""
    if not (isinstance(value, str) and value in choices):
        known = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
        raise ConfigError(f"{name} is {shown(value)}; it must be {known}{did_you_mean(value, choices)}")


def _path(name: str, value: object, remedy: str, least: int = 0) -> str:
    """Return a path as text, or refuse a value that is no path."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not is_text(path, MAX_PATH, least):
        raise ConfigError(f"{name} is {shown(value)}; give a path, {remedy}")
    return str(path)


def _check_log_file(pattern: str) -> None:
    """Refuse a log file's name with an unknown field in braces."""
    try:
        parts = list(Formatter().parse(pattern))
        wrong = [name for _, name, form, how in parts if name is not None and (name not in LOG_FILE or form or how)]
    except ValueError as exc:
        wrong = [str(exc)]
    if wrong or "\0" in pattern:
        known = ", ".join(f"{{{name}}}" for name in LOG_FILE)
        near = did_you_mean(wrong[0], LOG_FILE) if wrong else ""
        raise ConfigError(f"log.file is {shown(pattern)}; the names in braces may be {known}{near}")


def check_lease(lease_s: float, max_lease_s: float) -> None:
    """Refuse a lease that is too short, too long or no number."""
    if not MIN_LEASE_S <= lease_s <= max_lease_s:
        raise ConfigError(f"lease_s {lease_s} is outside [{MIN_LEASE_S:g}, max_lease_s {max_lease_s:g}] seconds")


def _positive(config: object, but: tuple[str, ...] = (), besides: tuple[str, ...] = ()) -> None:
    """Refuse fields that are no number, zero, negative, infinite or nan."""
    for entry in fields(config):  # type: ignore[arg-type]
        if entry.name in besides:
            continue
        if entry.type == "int":
            _check(config, integer, [entry.name], 0 if entry.name in but else 1, MAX_INTEGER)
        else:
            _check(config, seconds, [entry.name])
