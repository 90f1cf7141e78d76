"""A worker of vLLM without a device: real KV cache specs, real tensors, vLLM's own order of the connector's hooks.

It is what `gpu_worker.Worker` and `gpu_model_runner.GPUModelRunner` are to the connector: the hooks run in the same
order and at the same moments (`KVConnectorModelRunnerMixin` is vLLM's own), the caches are allocated by vLLM, and the
batch follows the scheduler's output as the model runner's does. In place of a forward pass it reads all that a query
would attend to and compares it with what must be there, writes what the model stores for the new tokens, and says the
next token. What it finds wrong is kept in `wrong`, for the test to ask.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator, is_conv_state_dim_first
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache, copy_kv_cache_blocks_inplace
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from tests.vllm.models import Attention, Mamba, Model, attention_words, next_token, state_values

MOST_WRONG = 20


@dataclass
class Running:
    """A request in the batch, as the model runner keeps it."""

    tokens: list[int]
    prompt: int
    blocks: tuple[list[int], ...]
    computed: int


class Rank(WorkerBase):
    """One rank's worker."""

    def init_device(self) -> None:
        torch.set_num_threads(1)
        self.model: Model = self.vllm_config.additional_config["model"]
        self.device = torch.device("cpu")
        self.wrong: list[str] = []
        self.is_judged = True
        self.hook_s: list[float] = []
        self.python_s = self.outside_s = 0.0
        self.met: Counter[str] = Counter()
        self._sequences: dict[str, Running] = {}
        self._output: Any = None
        self._affinity = os.sched_getaffinity(0)
        parallel = self.vllm_config.parallel_config
        with set_current_vllm_config(self.vllm_config):
            parallel_state.init_distributed_environment(
                parallel.world_size, self.rank, self.distributed_init_method, self.rank, "gloo"
            )
            parallel_state.ensure_model_parallel_initialized(
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                parallel.prefill_context_parallel_size,
                parallel.decode_context_parallel_size,
            )
        self.dcp = parallel_state.get_dcp_group()
        self.tp, self.tp_rank = parallel.tensor_parallel_size, parallel_state.get_tp_group().rank_in_group
        pipeline = parallel_state.get_pp_group()
        self.layers = self.model.stage(pipeline.rank_in_group, pipeline.world_size)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Make the layer objects that a connector may look at."""
        for i in self.layers:
            layer = self.model.layers[i]
            if isinstance(layer, Mamba):
                known = {"n_groups": layer.groups, "num_k_heads": layer.groups, "num_v_heads": layer.heads}
                known |= {"head_k_dim": layer.state_size, "head_v_dim": layer.head_size, "num_heads": layer.heads}
                known |= {"head_dim": layer.head_size, "ssm_state_size": layer.state_size, "tp_size": self.tp}
                self.vllm_config.compilation_config.static_forward_context[name_of(i)] = SimpleNamespace(**known)

    # -- what EngineCore asks before it starts

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return {name_of(i): self._spec(self.model.layers[i]) for i in self.layers}

    def _spec(self, layer: Attention | Mamba) -> KVCacheSpec:
        if isinstance(layer, Mamba):
            return self._mamba_spec(layer)
        fields: dict[str, Any] = {"block_size": self.model.block_size, "head_size": layer.size, "dtype": torch.bfloat16}
        fields["dcp_sharded"] = not layer.is_whole and layer.window is None
        if layer.is_mla:
            return MLAAttentionSpec(**fields, num_kv_heads=1, max_tp_shards=1)
        fields["num_kv_heads"] = max(1, layer.heads // self.tp)
        return (
            FullAttentionSpec(**fields)
            if layer.window is None
            else SlidingWindowSpec(**fields, sliding_window=layer.window)
        )

    def _mamba_spec(self, layer: Mamba) -> KVCacheSpec:
        if layer.kind == "mamba2":
            shapes = MambaStateShapeCalculator.mamba2_state_shape(
                tp_world_size=self.tp,
                intermediate_size=layer.heads * layer.head_size,
                n_groups=layer.groups,
                num_heads=layer.heads,
                head_dim=layer.head_size,
                state_size=layer.state_size,
                conv_kernel=layer.columns + 1,
            )
        else:
            shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
                self.tp, layer.groups, layer.heads, layer.state_size, layer.head_size, layer.columns + 1
            )
        kinds = MambaAttentionBackendEnum
        attention = next(each for each in self.model.layers if isinstance(each, Attention))
        each = 2 if attention.is_mla else 4
        page = self.model.block_size * max(1, attention.heads // self.tp) * attention.size * each
        return MambaSpec(
            block_size=self.vllm_config.cache_config.mamba_block_size,
            shapes=shapes,
            dtypes=(torch.bfloat16, torch.float32),
            page_size_padded=page,
            mamba_type=kinds.MAMBA2 if layer.kind == "mamba2" else kinds.GDN_ATTN,
            mamba_cache_mode=self.model.mamba_mode,
        )

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBHNC", "LBNHC", "BLHNC", "BHLNC"]

    def determine_available_memory(self) -> int:
        return 1 << 30

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def initialize_from_config(self, configs: Any) -> None:
        self.config = configs[self.rank] if isinstance(configs, list) else configs
        ensure_kv_transfer_initialized(self.vllm_config, self.config)
        # vLLM's own connector binds the thread to one core, and all processes of the test to the same one.
        os.sched_setaffinity(0, self._affinity)
        sizes = [self._kernel_block(group) for group in self.config.kv_cache_groups]
        layout = self.vllm_config.cache_config.get_resolved_kv_cache_layout()
        pool = get_kv_transfer_group().get_mem_pool_context() if has_kv_transfer_group() else None
        with pool or contextlib.nullcontext():
            self.caches = allocate_kv_cache(self.config, self.device, layout, sizes)
        self.bytes = {name: cache.view(torch.uint8).numpy() for name, cache in self.caches.items()}
        self.group_of = {name: i for i, group in enumerate(self.config.kv_cache_groups) for name in group.layer_names}
        if has_kv_transfer_group():
            get_kv_transfer_group().register_kv_caches(self.caches)

    def _kernel_block(self, group: Any) -> int:
        smaller = [getattr(self.model.layers[number_of(name)], "kernel_block", None) for name in group.layer_names]
        return min((size for size in smaller if size), default=int(group.kv_cache_spec.block_size))

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        if not has_kv_transfer_group() or (metadata := get_kv_transfer_group().get_handshake_metadata()) is None:
            return None
        parallel, place = self.vllm_config.parallel_config, self.tp_rank
        if parallel.prefill_context_parallel_size > 1 and parallel.decode_context_parallel_size > 1:
            place += parallel_state.get_pcp_group().rank_in_group * self.tp  # as `gpu_worker.Worker` does
        return {(parallel_state.get_pp_group().rank_in_group, place): metadata}

    # -- a step

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        """One step; the tokens follow in `sample_tokens`."""
        began = time.perf_counter()
        try:
            return self._execute(scheduler_output)
        finally:
            self.hook_s.append(time.perf_counter() - began)

    def _execute(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        if is_late := self.vllm_config.use_v2_model_runner:
            self._follow(scheduler_output)
        if has_kv_transfer_group():
            get_kv_transfer_group().handle_preemptions(scheduler_output.kv_connector_metadata)
        if not is_late:
            self._follow(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            if not has_kv_transfer_group():
                return EMPTY_MODEL_RUNNER_OUTPUT
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(scheduler_output, self.vllm_config)
        with (
            set_forward_context(None, self.vllm_config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduler_output) as kv_output,
        ):
            ids = list(scheduler_output.num_scheduled_tokens)
            drafts = scheduler_output.scheduled_spec_decode_tokens
            said = [
                self._forward(name, scheduler_output.num_scheduled_tokens[name], drafts.get(name, ())) for name in ids
            ]
            # Of this thread's CPU, so that a thread that takes Python's lock meanwhile makes the step longer.
            until = time.thread_time() + self.python_s
            while self.python_s and time.thread_time() < until:
                pass
        self._output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=said,
            kv_connector_output=kv_output,
        )
        return None

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput:
        output, self._output = self._output, None
        if self.outside_s:
            time.sleep(self.outside_s)
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Guess what follows: the first token rightly, except every third time, and the others by chance."""
        if (most := self.vllm_config.num_speculative_tokens) == 0:
            return None
        guesses = [[next_token(each.tokens) ^ (len(each.tokens) % 3 == 0)] for each in self._sequences.values()]
        for each, guess in zip(self._sequences.values(), guesses, strict=True):
            while len(guess) < most:
                guess.append(next_token([*each.tokens, *guess]) ^ (len(each.tokens) % 2))
        return DraftTokenIds([*self._sequences], guesses)

    def execute_dummy_batch(self) -> None:
        pass

    def _follow(self, scheduler_output: Any) -> None:
        """Bring the batch up to date, as `GPUModelRunner._update_states` does."""
        self.met["preempted"] += len(scheduler_output.preempted_req_ids or ())
        for name in scheduler_output.finished_req_ids:
            self._sequences.pop(name, None)
        for block in scheduler_output.new_block_ids_to_zero or ():
            self._zero(block)
        if scheduler_output.kv_cache_block_copies:
            copy_kv_cache_blocks_inplace(
                self.caches.values(), self.config.num_blocks, scheduler_output.kv_cache_block_copies
            )
        for new in scheduler_output.scheduled_new_reqs:
            scheduled = scheduler_output.num_scheduled_tokens[new.req_id]
            self.met["chunks"] += new.num_computed_tokens + scheduled < len(new.prompt_token_ids)
            self.met["cached"] += new.num_computed_tokens > 0
            self._sequences[new.req_id] = Running(
                tokens=list(new.prefill_token_ids or new.prompt_token_ids),
                prompt=len(new.prompt_token_ids),
                blocks=tuple(list(ids) for ids in new.block_ids),
                computed=new.num_computed_tokens,
            )
        cached = scheduler_output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            sequence, blocks = self._sequences[name], cached.new_block_ids[i]
            sequence.computed = cached.num_computed_tokens[i]
            del sequence.tokens[sequence.prompt + cached.num_output_tokens[i] :]
            if name in cached.resumed_req_ids:
                sequence.blocks = tuple(list(ids) for ids in blocks)
                if name in cached.all_token_ids:
                    sequence.tokens = list(cached.all_token_ids[name])
            else:
                for mine, more in zip(sequence.blocks, blocks or (), strict=False):
                    mine.extend(more)

    def _zero(self, block: int) -> None:
        for name, cache in self.bytes.items():
            if isinstance(self.model.layers[number_of(name)], Attention):
                ratio = cache.shape[0] // self.config.num_blocks
                cache[block * ratio : (block + 1) * ratio] = 0

    def _forward(self, name: str, scheduled: int, drafts: Sequence[int]) -> list[int]:
        sequence = self._sequences[name]
        known = list(sequence.tokens)
        sequence.tokens += [max(0, each) for each in drafts]  # -1 fills a batch up
        begin, end = sequence.computed, sequence.computed + scheduled
        if end > len(sequence.tokens):
            self._complain(f"{name}: tokens up to {end} are computed, but it has {len(sequence.tokens)}")
            return []
        said: list[int] = []
        for guess in [*drafts, None] if end == len(sequence.tokens) else ():
            said.append(next_token([*known, *said]))
            if guess != said[-1]:
                break
        # What a draft layer stores for a token is known with the token that follows.
        after = [*known, *said][1:] if said else known[1:]
        for layer_name, cache in self.bytes.items() if self.is_judged else ():
            number = number_of(layer_name)
            layer, blocks = self.model.layers[number], sequence.blocks[self.group_of[layer_name]]
            if isinstance(layer, Attention):
                seen = begin if layer.window is None else min(begin, layer.window - 1)
                tokens = after if layer.is_draft else sequence.tokens
                self._attend(name, number, layer, cache, blocks, tokens[begin - seen : begin], begin - seen)
                at, offsets, written, _ = self._place(number, layer, cache, blocks, tokens[begin:end], begin)
                cache[at, :, offsets] = written
            else:
                self._recur(name, number, layer, cache[:, 0, 0], blocks, sequence.tokens, begin, end)
        sequence.computed, sequence.tokens = end, [*known, *said]
        return said

    def _place(
        self, number: int, layer: Attention, cache: Any, blocks: Sequence[int], tokens: Sequence[int], first: int
    ) -> tuple[Any, Any, npt.NDArray[np.uint8], Any]:
        """Where tokens lie on this rank, what is to be found there: (token, head, byte), and which tokens these are."""
        size = cache.shape[2]
        ratio = cache.shape[0] // self.config.num_blocks
        positions = np.arange(first, first + len(tokens))
        # vLLM's formula for slots, from `v1/worker/block_table.py` of 0.33.0, lines 351 to 375.
        shares = 1 if layer.is_whole or layer.window is not None else self.dcp.world_size
        run = self.vllm_config.parallel_config.cp_kv_cache_interleave_size
        virtual = positions // (size * ratio * shares)
        offsets = positions - virtual * size * ratio * shares
        here = offsets // run % shares == (self.dcp.rank_in_group if shares > 1 else 0)
        local = (offsets // (shares * run) * run + offsets % run)[here]
        at = np.asarray(blocks, dtype=np.int64)[virtual[here]] * ratio + local // size
        mine = cache.shape[1]
        whole = 1 if layer.is_mla else layer.heads
        heads = [self.tp_rank * whole // self.tp + head for head in range(mine)]
        words = attention_words(number, heads if whole > 1 else [0], first, tokens, cache.shape[3] // 8)
        return at, local % size, words.view(np.uint8).transpose(1, 0, 2)[here], positions[here]

    def _attend(
        self,
        name: str,
        number: int,
        layer: Attention,
        cache: Any,
        blocks: Sequence[int],
        tokens: Sequence[int],
        first: int,
    ) -> None:
        if not tokens:
            return
        at, offsets, expected, positions = self._place(number, layer, cache, blocks, tokens, first)
        good = (cache[at, :, offsets] == expected).all(axis=(1, 2))
        if not good.all():
            bad = np.flatnonzero(~good)
            self._complain(
                f"{name}: layer {number} holds wrong bytes for {len(bad)} of {len(at)} tokens from {first} on, "
                f"first for {positions[bad[0]]} in block {int(at[bad[0]])}"
            )

    def _recur(
        self,
        name: str,
        number: int,
        layer: Mamba,
        pages: Any,
        blocks: Sequence[int],
        tokens: Sequence[int],
        begin: int,
        end: int,
    ) -> None:
        size = self.vllm_config.cache_config.mamba_block_size
        if begin:
            page = blocks[(begin - 1) // size]
            state = self._state(number, layer, tokens[:begin])
            if not np.array_equal(pages[page, : len(state)], state):
                self._complain(f"{name}: layer {number} holds a wrong state of {begin} tokens in block {page}")
        state = self._state(number, layer, tokens[:end])
        pages[blocks[(end - 1) // size], : len(state)] = state

    def _state(self, number: int, layer: Mamba, tokens: Sequence[int]) -> npt.NDArray[np.uint8]:
        """The bytes of this rank's state after these tokens: the convolution, then the heads."""
        channels = []
        for part, (heads, size) in enumerate(layer.parts()):
            local = max(1, heads // self.tp)
            first = (self.tp_rank * heads // self.tp) * size
            ids = np.arange(first, first + local * size, dtype=np.uint64)[:, None] * np.uint64(64)
            columns = ids + np.arange(layer.columns, dtype=np.uint64)[None, :]
            channels.append(state_values(number, tokens, part, columns))
        convolution = np.concatenate(channels)
        if not is_conv_state_dim_first():
            convolution = convolution.T
        heads = layer.heads // self.tp
        elements = layer.head_size * layer.state_size
        ids = np.arange(self.tp_rank * heads * elements, (self.tp_rank + 1) * heads * elements, dtype=np.uint64)
        temporal = state_values(number, tokens, 9, ids)
        return np.concatenate(
            [convolution.astype(np.uint16).reshape(-1).view(np.uint8), temporal.astype(np.uint32).view(np.uint8)]
        )

    def _complain(self, text: str) -> None:
        if len(self.wrong) < MOST_WRONG:
            self.wrong.append(f"rank {self.rank}: {text}")

    # -- the rest of a worker's life

    def take_wrong(self) -> list[str]:
        """What was wrong since the last question."""
        wrong, self.wrong = self.wrong, []
        return wrong

    def take_met(self) -> Counter[str]:
        """What happened since the last question."""
        met, self.met = self.met, Counter()
        return met

    def judge(self, is_judged: bool) -> None:
        """Write and compare, or only run the hooks."""
        self.is_judged = is_judged

    def touch(self) -> None:
        """Write every page of the caches, as a serving engine has after a while."""
        for cache in self.bytes.values():
            cache[:] = 1

    def model_time(self, python_s: float, outside_s: float) -> None:
        """Have each forward take so long in Python, and then outside of it."""
        self.python_s, self.outside_s = python_s, outside_s

    def take_hook_s(self) -> list[float]:
        """Seconds that each step held this thread since the last question."""
        taken, self.hook_s = self.hook_s, []
        return taken

    def scribble(self) -> None:
        """Spoil the first layer's cache."""
        self.bytes[name_of(self.layers[0])][:] ^= 1

    def look(self) -> dict[str, Any]:
        """What asynckv's engine in this worker still has to do, once it has been audited; empty without one."""
        found = engine_in(get_kv_transfer_group()) if has_kv_transfer_group() else None
        if found is None:
            return {}
        thread, engine = found

        async def ask() -> dict[str, Any]:
            engine.check_integrity()
            counters = {name: count for name, count in engine.statistics().counters.items() if count}
            return {
                "requests": [str(each) for each in engine.requests()],
                "holds": [str(each) for each in engine.holds()],
                "counters": counters,
            }

        return dict(thread.call(ask(), 10.0))

    def sleep(self, level: int = 1) -> None:
        """What memory held is lost, as with a device's."""
        if has_kv_transfer_group():
            get_kv_transfer_group().unregister_kv_caches()
        for cache in self.bytes.values():
            cache[:] = 0xDB

    def wake_up(self, tags: list[str] | None = None) -> None:
        for cache in self.bytes.values():
            cache[:] = 0
        if has_kv_transfer_group() and (tags is None or "kv_cache" in tags):
            get_kv_transfer_group().restore_kv_caches()

    def reset_encoder_cache(self) -> None:
        pass

    def shutdown(self) -> None:
        ensure_kv_transfer_shutdown()


def name_of(number: int) -> str:
    return f"model.layers.{number}.attn"


def number_of(name: str) -> int:
    return int(name.split(".")[2])


def engine_in(connector: Any, depth: int = 4) -> tuple[Any, Any] | None:
    """The `EngineThread` of a connector and its engine, however deep in the connector it is."""
    from asynckv.embed import EngineThread

    if isinstance(connector, EngineThread):
        return connector, connector.engine
    if not depth or not hasattr(connector, "__dict__"):
        return None
    for value in [*vars(connector).values()]:
        for each in value if isinstance(value, list) else [value]:
            if type(each).__module__.startswith(("asynckv", "vllm.distributed.kv_transfer")):
                found = engine_in(each, depth - 1)
                if found is not None:
                    return found
    return None
