"""The scheduler's half: the catalogue as an `OffloadingManager` of vLLM.

vLLM asks for single keys and for lists of keys. For the catalogue each list is a prompt of blocks of one token, some
of them wanted. Slots are given at once; vLLM calls `complete_store` and `complete_load` when workers have moved the
bytes.

Blocks that are only in files are brought to host memory first. A lookup of such a block returns `HIT_PENDING`, and the
end of the step orders all of these. This process moves the bytes, because then a file that cannot be read is a miss,
while a failed load of a worker would end the engine. The blocks are pinned until their request has loaded them, has
begun without them, or has ended. The files' thread runs between vLLM's calls, because vLLM holds `lock` for a step.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from asynckv.config import OffloadConfig
from asynckv.core.events import Ending
from asynckv.edges.files.block_records import BlockRecords
from asynckv.edges.files.tier import FileTier
from asynckv.errors import BackendError
from asynckv.integrations.vllm.compat import (
    CacheHitSource,
    CPULoadStoreSpec,
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingConfig,
    OffloadingConnectorStats,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from asynckv.integrations.vllm.offload.files import Files, folder_of, tell_of_start
from asynckv.integrations.vllm.offload.region import Region, Shape, path_of
from asynckv.integrations.vllm.offload.seen import OpenMoves, Seen
from asynckv.integrations.vllm.options import WORDS
from asynckv.offload.catalogue import Catalogue
from asynckv.offload.entry import EntryState
from asynckv.offload.job import JobEnded, JobOutcome, Move, MoveKind
from asynckv.offload.keys import StoredGroup
from asynckv.ports import FOUND_DAMAGED, CopyOp, RecordNews, RecordPlane, RecordsEnded

log = logging.getLogger("vllm.asynckv")
ALL = 1 << 62  # bytes; no budget, because vLLM itself decides what workers move
CLOSE_S = 3.0
FULL_S = 60.0
READY = EntryState.READY

COUNTED, GAUGES = WORDS["offload"]["counters"], WORDS["offload"]["gauges"]
PREFIX = "asynckv:kv_offload_"


class _Request:
    def __init__(self, name: str) -> None:
        self.name = name
        self.coming: set[OffloadKey] = set()  # ordered from files
        self.refused: set[OffloadKey] = set()  # in files, but could not be brought
        self.fetched: set[OffloadKey] = set()
        self.pins: list[str] = []
        self.used: dict[OffloadKey, None] = {}
        self.num_new = 0  # number of used blocks since the policy was last told of all in order
        self.is_over = False


class Manager(OffloadingManager):
    """asynckv's manager. `groups` describe vLLM's groups to the catalogue; `records` is for tests."""

    def __init__(
        self,
        config: OffloadingConfig,
        offload: OffloadConfig,
        shape: Shape,
        groups: Sequence[StoredGroup],
        records: RecordPlane | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shape, self._groups, self._clock, self._timeout_s = shape, groups, clock, offload.timeout_s
        self._places = {group.group_id: place for place, group in enumerate(config.groups)}
        self._world_size = config.parallel.world_size
        self._is_checked = False  # True once all workers are known to share this memory
        self._blocks = BlockRecords(groups, f"vllm-{shape.block_bytes}x{shape.blocks}x{shape.ranks}")
        self._lock = threading.RLock()
        self.catalogue = Catalogue(
            groups,
            1,
            shape.slots * shape.slot_bytes,
            offload.file_bytes,
            policy=offload.policy,
            budgets=dict.fromkeys(MoveKind, offload.max_bytes) | {MoveKind.LOAD: ALL, MoveKind.STORE: ALL},
            move_bytes=offload.max_bytes,
        )
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self._told: Counter[str] = Counter()
        self._is_lru = offload.policy == "lru"
        self._wake_at = math.inf
        self._next_told_full = -math.inf
        self._names = itertools.count(1)
        self._cut: dict[str, list[Move]] = {}  # moves for workers, of the current job
        self._stores, self._loads = OpenMoves(), OpenMoves()
        self._stale: list[Move] = []  # moves from before the last `reset_cache`, which workers may still carry out
        self._fetches: dict[str, tuple[_Request, list[OffloadKey]]] = {}  # jobs that bring blocks from files
        self._wanted: dict[_Request, dict[OffloadKey, None]] = {}  # found in files since the last step ended
        self._pinned: dict[str, _Request] = {}  # requests with pinned blocks, by their ids
        self._moving: dict[int, tuple[str, int]] = {}  # name of the counter, and number of blocks
        self._seen = Seen(self.catalogue.host, self._is_known, config.enable_kv_cache_events)
        self._path = path_of(config.engine_id)
        self._has_name = True
        self._region: Region | None = None
        self._files: Files | None = None
        self._open(config, offload, records)

    def _open(self, config: OffloadingConfig, offload: OffloadConfig, records: RecordPlane | None) -> None:
        folder = folder_of(offload.directory, config, self._groups)
        if records is None and offload.directory:
            records = FileTier(folder, offload.file_bytes, name=f"{config.engine_id}-files")
            tell_of_start(folder, offload.file_bytes)
        if records is None:
            return
        self._region = Region(config.engine_id, self._shape)
        files, begun_at = Files(records, self._hear, self._on_time), time.monotonic()
        found, others, strange = self._blocks.known(files.start(self._region.memory))
        self._files = files
        files.forget(strange)
        kept = self.catalogue.recover(found, others)
        log.info("%d blocks were found in %s, within %.1f s", kept, folder, time.monotonic() - begun_at)
        said = records.statistics()
        damage = {what: said.get(f"found_{what}", 0) for what in FOUND_DAMAGED}
        if any(damage.values()):
            log.warning("not all stored blocks of %s are there: %s", folder, damage)
        if strange:
            log.warning("%d blocks in %s are dropped: they do not match its name", len(strange), folder)
        self._forget()

    @property
    def lock(self) -> threading.RLock:
        return self._lock

    # -- questions -----------------------------------------------------------------------------------

    def _find(self, key: OffloadKey) -> tuple[int, bytes]:
        """Return a key's group, and the whole key as its hash, because a prompt names no block twice."""
        return self._places[get_offload_group_idx(key)], key

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self.counts["asked_blocks"] += 1
        place, hash_ = self._find(key)
        allows = req_context.load_tier_filter.allows
        entry = self.catalogue.host.index[place].get(hash_)
        if entry is not None:
            request = req_context.get_state(_Request)
            if allows(Medium.CPU, Locality.LOCAL) or (request is not None and key in request.fetched):
                return LookupResult.HIT if entry.state is READY else LookupResult.HIT_PENDING
        if entry is not None or not allows(Medium.STORAGE, Locality.LOCAL):
            return LookupResult.MISS
        kept, request = self.catalogue.file.index[place].get(hash_), self._request(req_context)
        if kept is None or kept.state is not READY or key in request.refused:
            return LookupResult.MISS
        if key not in request.coming:
            self._wanted.setdefault(request, {})[key] = None
        return LookupResult.HIT_PENDING

    def _request(self, context: ReqContext) -> _Request:
        request: _Request | None = context.get_state(_Request)
        if request is None:
            request = _Request(context.req_id)
            context.set_state(request)
        return request

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.DISK if key in self._request(req_context).fetched else CacheHitSource.HOST

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.catalogue.touch(list(dict.fromkeys(keys)))

    # -- what workers move ---------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Find slots for as many new blocks as there is room for; None if there is none."""
        wanted = list(dict.fromkeys(keys))
        new = [key for key in wanted if not self._is_known(key)]
        self._seen.evicted = []
        where: dict[OffloadKey, int] = {}
        if wanted:
            name = f"store{next(self._names)}"
            self.catalogue.store(name, wanted, positions=self._positions(wanted))
            self._advance()
            for move in self._cut.pop(name, []):
                where |= self._stores.open(move, wanted)
        if refused := sum(key not in where for key in new):
            self.counts["refused_blocks"] += refused
            self._tell_full()
        if new and not where:
            return None
        self._request(req_context).used |= dict.fromkeys(wanted)
        stored = [key for key in wanted if key in where]
        return PrepareStoreOutput(stored, CPULoadStoreSpec([where[key] for key in stored]), self._seen.evicted)

    def _tell_full(self) -> None:
        """Log what keeps all slots, at most once a minute, because vLLM asks again in each step."""
        if self._clock() < self._next_told_full:
            return
        self._next_told_full = self._clock() + FULL_S
        busy = Counter({str(kind): 0 for kind in MoveKind})
        for running in self.catalogue.traffic.running.values():
            busy[running.move.kind] += running.move.num_blocks
        kept = {entry for held in self.catalogue.pins.values() for tier, entry in held if tier is self.catalogue.host}
        log.warning(
            "host memory is full, and blocks are not stored: of %d slots workers write %d and read %d, %d are being "
            "written to files and %d read from there, and %d are kept for waiting requests; raise host_bytes if "
            "this does not pass",
            self._shape.slots,
            *(busy[kind] for kind in (MoveKind.STORE, MoveKind.LOAD, MoveKind.WRITE_BACK, MoveKind.PROMOTION)),
            len(kept),
        )

    def _is_known(self, key: OffloadKey) -> bool:
        place, hash_ = self._find(key)
        return hash_ in self.catalogue.host.index[place]

    def _positions(self, keys: Sequence[OffloadKey]) -> list[list[int]]:
        out: list[list[int]] = [[] for _ in self._groups]
        for position, key in enumerate(keys):
            out[self._places[get_offload_group_idx(key)]].append(position)
        return out

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        ending = Ending.DONE if success else Ending.FAILED
        self._take_name()
        for move in self._stores.completed(keys):
            self.catalogue.ended(move.move_id, ending)
            if success:
                self.counts["stored_blocks"] += move.num_blocks
                self._seen.stored(move)
        self._chain(self._request(req_context), req_context, len(keys))
        self._advance()

    def _take_name(self) -> None:
        """Unlink the memory's file, because all workers have mapped it."""
        if self._has_name:
            self._path.unlink(missing_ok=True)
            self._has_name = False

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Return the slots of blocks and keep them until `complete_load`; raise `BackendError` if some are missing."""
        wanted = list(dict.fromkeys(keys))
        name = f"load{next(self._names)}"
        self.catalogue.load(name, wanted, positions=self._positions(wanted))
        self._advance()
        where: dict[OffloadKey, int] = {}
        for move in self._cut.pop(name, []):
            where |= self._loads.open(move, wanted)
        if len(where) != len(wanted):
            self.catalogue.cancel(name)
            raise BackendError(f"{len(wanted) - len(where)} of {len(wanted)} blocks are not in host memory")
        request = self._request(req_context)
        self._release(request)
        request.used |= dict.fromkeys(wanted)
        self._chain(request, req_context, len(wanted))
        return CPULoadStoreSpec([where[key] for key in keys])

    def _chain(self, request: _Request, context: ReqContext, num_new: int) -> None:
        """Note the use of all blocks of a request, the end of its prompt first, so that LRU evicts ends first.

        vLLM stores a prompt's beginning first, so this is repeated when an eighth is new, and at the request's end.
        """
        request.num_new += num_new
        if not self._is_lru or request.num_new * 8 < (1 if request.is_over else len(request.used)):
            return  # S3-FIFO counts uses, and these are one use
        request.num_new = 0
        at = context.get_offload_key_position
        order = sorted(enumerate(request.used), key=lambda each: (at(each[1]) or 0, each[0]), reverse=True)
        found = [self._find(key) for _, key in order]
        for tier in (self.catalogue.host, self.catalogue.file):
            tier.use(entry for place, hash_ in found if (entry := tier.index[place].get(hash_)) is not None)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._take_name()
        for move in self._loads.completed(keys):
            self.counts["loaded_blocks"] += move.num_blocks
            self.catalogue.ended(move.move_id, Ending.DONE)
        self._advance()

    # -- requests and steps --------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._request(req_context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._request(req_context)
        request.is_over = True
        self._wanted.pop(request, None)
        self._release(request)
        self._chain(request, req_context, 0)

    def _release(self, request: _Request) -> None:
        pins, request.pins = request.pins, []
        self._pinned.pop(request.name, None)
        request.refused.clear()
        for pin in pins:
            self.catalogue.unpin(pin)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for name in context.new_req_ids:
            if (begun := self._pinned.get(name)) is not None:
                self._release(begun)
        wanted, self._wanted = self._wanted, {}
        for request, found in wanted.items():
            name, keys = f"fetch{next(self._names)}", list(found)
            self._fetches[name] = request, keys
            request.coming |= set(keys)
            until = self._clock() + self._timeout_s
            self.catalogue.load(name, keys, positions=self._positions(keys), until=until)
        if wanted:
            self._advance()

    def reset_cache(self) -> None:
        """Forget everything. Slots that workers may still touch are reused only after `on_reset_flushed`."""
        for name in [*self.catalogue.pins]:
            self.catalogue.unpin(name)
        for name in [*self._fetches]:
            self.catalogue.cancel(name)
        self.catalogue.evict()
        self._seen.clear()
        self._stale += self._stores.abandon() + self._loads.abandon()
        self._advance()

    def on_reset_flushed(self) -> None:
        stale, self._stale = self._stale, []
        for move in stale:
            self.catalogue.ended(move.move_id, Ending.DONE if move.kind is MoveKind.LOAD else Ending.FAILED)
        self._advance()

    # -- what is told --------------------------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._seen.take()

    def get_stats(self) -> OffloadingConnectorStats:
        stats = OffloadingConnectorStats()
        for name, count in self.counts.items():  # also 0, so that a metric is there before its first count
            stats.increase_counter(PREFIX + name, count - self._told[name])
        self._told = self.counts.copy()
        said = self.catalogue.statistics()
        for name in GAUGES:
            stats.set_gauge(PREFIX + name, said.get(name, 0))
        return stats

    def _forget(self) -> None:
        freed = self.catalogue.forgotten()
        if freed and self._files is not None:
            self._files.forget(self._blocks.places(freed))

    def shutdown(self) -> None:
        """End the files' thread. Call it without the lock. Idempotent."""
        self._take_name()
        files, self._files = self._files, None
        if files is not None and not files.close(CLOSE_S):
            log.error("host memory is kept, because a file read or write still uses it")
        elif self._region is not None:
            self._region.close()
            self._region = None

    # -- what is moved here --------------------------------------------------------------------------

    def _advance(self) -> None:
        is_new = True
        while is_new:
            is_new = False
            moves = self.catalogue.moves(self._clock())
            self._forget()  # before new writes to these places are posted, or their records would be forgotten
            for move in moves:
                if move.kind in (MoveKind.STORE, MoveKind.PROMOTION):
                    self._seen.reuse(move)
                if move.kind in (MoveKind.PROMOTION, MoveKind.WRITE_BACK):
                    self._post(move)
                elif (fetch := self._fetches.get(move.job_id)) is not None:
                    self._keep(move, *fetch)
                    is_new = True
                else:
                    self._cut.setdefault(move.job_id, []).append(move)
            for news in self.catalogue.news():
                if isinstance(news, JobEnded) and (fetch := self._fetches.pop(news.job_id, None)) is not None:
                    self._fetched(news, *fetch)
        wake_at, self._wake_at = self._wake_at, self.catalogue.wake_at
        if self._files is not None and wake_at != self._wake_at < math.inf:
            self._files.wake_in(max(0.0, self._wake_at - self._clock()))

    def _post(self, move: Move) -> None:
        files = self._files  # None during the shutdown
        if files is None or (not self._is_checked and not self._check()):
            self.catalogue.ended(move.move_id, Ending.FAILED)
            return
        is_read = move.kind is MoveKind.PROMOTION
        self._moving[move.move_id] = "fetched_blocks" if is_read else "written_back_blocks", move.num_blocks
        files.post(move.move_id, CopyOp.READ if is_read else CopyOp.WRITE, self._blocks.of(move))

    def _check(self) -> bool:
        """Return True if all workers share this process's memory; otherwise switch files off."""
        assert self._region is not None
        joined = self._region.joined()
        self._is_checked = joined == self._world_size
        if not self._is_checked and not self.catalogue.file.is_off:
            log.error(
                "only %d of %d ranks share host memory with the scheduler's process: files need all ranks of an engine "
                "on one host; leave directory and file_bytes out",
                *(joined, self._world_size),
            )
            self.catalogue.switch_off()
        return self._is_checked

    def _keep(self, move: Move, request: _Request, keys: list[OffloadKey]) -> None:
        self._seen.stored(move)
        if not request.is_over:
            positions = [[] for _ in self._groups]  # type: list[list[int]]
            for piece in move.pieces:
                positions[piece.group] += piece.positions
                request.fetched |= {keys[position] for position in piece.positions}
            name = f"pin{next(self._names)}"
            self.catalogue.pin(name, list(keys), positions=positions)
            request.pins.append(name)
            self._pinned[request.name] = request
        self.catalogue.ended(move.move_id, Ending.DONE)

    def _fetched(self, ended: JobEnded, request: _Request, keys: list[OffloadKey]) -> None:
        """Note the blocks that could not be brought; they are misses for this request."""
        request.coming -= set(keys)
        if ended.outcome is JobOutcome.DONE:
            return
        lacking = {keys[position] for positions in ended.missing for position in positions}
        missing = {key for key in lacking if not self._is_known(key)}  # the others can be loaded
        request.refused |= missing
        self.counts["unfetched_blocks"] += len(missing)
        if missing and ended.outcome is not JobOutcome.CANCELLED:
            log.warning("%d of %d blocks were not brought from files: %s", len(missing), len(keys), ended.cause)

    def _hear(self, news: Sequence[RecordNews]) -> None:
        with self._lock:
            for each in news:
                if not isinstance(each, RecordsEnded):
                    log.warning("files are used no more: %s", each.cause)
                    self.catalogue.switch_off(reads=each.reads)
                    continue
                ending = Ending.DONE if each.ending is Ending.FAILED and each.lost else each.ending
                kind, num_blocks = self._moving.get(each.move_id, ("", 0))
                if ending is not Ending.IN_DOUBT:
                    self._moving.pop(each.move_id, None)
                if ending is Ending.DONE:
                    self.counts[kind] += num_blocks - len(each.lost)
                self.catalogue.ended(each.move_id, ending, each.cause, each.lost)
            self._advance()

    def _on_time(self) -> None:
        with self._lock:
            self._wake_at = math.inf
            self._advance()
