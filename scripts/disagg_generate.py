"""Prefill real models in one process and decode them in another: `python -m scripts.disagg_generate --help`.

Controls prove that the comparison works: if any part of any layer is set to zero, the logits must differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import torch
import typer

from asynckv import Engine, EngineConfig, PrefillRanks, configure_logging
from asynckv.errors import ConfigError
from asynckv.geometry.layout import Part, View
from asynckv.layout import register_memory
from asynckv.tools.bench.processes import Failure
from asynckv.tools.plan.layouts import model_groups, model_layout, with_addresses
from asynckv.tools.plan.models import Heads, Latent, Model, State, model_of_config
from scripts import command
from tests.lab.fleet import Fleet, Process

ATTENTION = {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8, "vocab_size": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2, **ATTENTION},
    "deepseek_v3": {
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 128,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "gemma3_text": {
        "hidden_size": 96,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        **ATTENTION,
    },
    "gpt_oss": {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "sliding_window": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        **ATTENTION,
    },
    "bamba": {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "mamba_n_heads": 12,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        **ATTENTION,
    },
    "nemotron_h": {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "mamba_num_heads": 12,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        **ATTENTION,
    },
    "falcon_mamba": {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": 128,
        "state_size": 8,
        "expand": 2,
        "conv_kernel": 4,
        "time_step_rank": 8,
    },
    "jamba": {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "vocab_size": 128,
        "attn_layer_period": 4,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "use_mamba_kernels": False,
    },
    "qwen3_next": {
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 6,
        "linear_key_head_dim": 8,
        "linear_num_value_heads": 12,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        **ATTENTION,
    },
}
NUM_BLOCKS = 24
HEAR_S = 120.0

BlockIds = Sequence[tuple[int, Sequence[int | None]]]
"""For each cache group: the first token, and the blocks from there on."""


class Numbers(msgspec.Struct):
    """Numbers on which both processes must agree."""

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    prefill_tp: int
    decode_tp: int
    prefill_block_size: int
    block_size: int
    seed: int

    def side(self, role: str) -> tuple[int, int, str, str]:
        """Return TP size, block size and memory orders of one side; the layouts of the sides differ."""
        if role == "prefill":
            return self.prefill_tp, self.prefill_block_size, "cross-hnd", "channel"
        return self.decode_tp, self.block_size, "nhd", "row"


# -- models --------------------------------------------------------------------------------------------------


def load() -> Any:
    """Import transformers, or say how to get it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers
    except ImportError:
        raise ConfigError("transformers is not installed; run: pip install 'transformers==5.23.0'") from None
    quiet: Any = transformers
    quiet.logging.set_verbosity_error()
    return quiet


class Subject:
    """A model with random weights, the same in every process."""

    def __init__(self, family: str, seed: int) -> None:
        transformers = load()
        torch.manual_seed(seed)
        self.config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
        self.model = transformers.AutoModelForCausalLM.from_config(
            self.config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            for weight in self.model.parameters():
                if weight.ndim == 2:
                    weight *= 5  # otherwise tokens hardly depend on earlier ones
        self.dynamic_cache = transformers.DynamicCache
        kept = model_of_config(self.config.to_dict(), family)
        # transformers keeps one column more than a convolution needs.
        layers = [
            msgspec.structs.replace(x, columns=x.columns + 1, dtype="") if isinstance(x, State) else x
            for x in kept.layers
        ]
        self.kept = Model(family, tuple(layers), "float32")

    @torch.no_grad()
    def step(self, tokens: torch.Tensor, cache: Any = None, position: int = 0) -> tuple[torch.Tensor, Any]:
        """Run the model on more tokens, and return the last logits and the cache."""
        name = "cache_params" if self.config.model_type in ("falcon_mamba", "mamba", "mamba2") else "past_key_values"
        given = {} if cache is None else {name: cache}
        if cache is not None and name == "past_key_values":
            given["position_ids"] = torch.arange(position, position + tokens.shape[1])[None]
        out = self.model(tokens, use_cache=True, **given)
        return out.logits[:, -1].clone(), getattr(out, name)

    def generate(self, first: torch.Tensor, cache: Any, tokens: int, count: int) -> tuple[torch.Tensor, list[int]]:
        """Continue greedily from logits and a cache, and return all logits and the chosen tokens."""
        logits, chosen = [], []
        token = first.argmax(-1, keepdim=True)
        for i in range(count):
            chosen.append(int(token))
            out, cache = self.step(token, cache, tokens + i)
            logits.append(out)
            token = out.argmax(-1, keepdim=True)
        return torch.cat(logits), chosen

    def take_apart(self, cache: Any, tokens: int) -> list[dict[str, torch.Tensor]]:
        """Return the cache as the parts of its model: `[token, unit, ...]`, or `[unit, ...]` for states."""
        out = []
        for layer, held in zip(self.kept.layers, _real(cache), strict=True):
            match layer:
                case Heads():
                    out.append({"k": held.keys[0].transpose(0, 1), "v": held.values[0].transpose(0, 1)})
                case Latent():
                    out.append({"latent": torch.cat((held.keys[0, 0], held.values[0, 0]), -1)})
                case State():
                    conv, parts, at = held.conv_states[0][0], {}, 0
                    for p in layer.conv:
                        rows = conv[at : at + p.units * p.width]
                        parts[f"conv_{p.name}"] = rows.reshape(p.units, p.width, layer.columns)
                        at += p.units * p.width
                    assert at == len(conv)
                    out.append({**parts, "state": held.recurrent_states[0][0].reshape(layer.units, *layer.shape)})
        return out

    def put_together(self, parts: Sequence[Mapping[str, torch.Tensor]], tokens: int) -> Any:
        """Return a new cache made of the parts."""
        cache = self.dynamic_cache(config=self.config)
        numbers = [i for i, held in enumerate(cache.layers) if type(held).__name__ != "DummyLayer"]
        for number, layer, found in zip(numbers, self.kept.layers, parts, strict=True):
            held = cache.layers[number]
            match layer:
                case Heads():
                    held.update(found["k"].transpose(0, 1)[None], found["v"].transpose(0, 1)[None])
                case Latent():
                    held.update(
                        found["latent"][None, None, :, : layer.rank], found["latent"][None, None, :, layer.rank :]
                    )
                case State():
                    conv = [found[f"conv_{p.name}"].reshape(-1, layer.columns) for p in layer.conv]
                    cache.update_conv_state(torch.cat(conv)[None], number)
                    shape = (layer.units, *layer.shape)
                    cache.update_recurrent_state(found["state"].reshape(1, *shape), number)
            if hasattr(held, "cumulative_length"):
                held.cumulative_length = tokens
        return cache


def _real(cache: Any) -> list[Any]:
    return [held for held in cache.layers if type(held).__name__ != "DummyLayer"]


def prompt(numbers: Numbers) -> torch.Tensor:
    """Return the prompt, which is the same in every process."""
    return torch.randint(0, 128, (1, numbers.prompt_tokens), generator=torch.Generator().manual_seed(numbers.seed + 1))


# -- paged memory ---------------------------------------------------------------------------------------------


class Pages:
    """Paged memory of one rank, in one of the memory orders of engines."""

    def __init__(self, subject: Subject, *, num_blocks: int = NUM_BLOCKS, **how: Any) -> None:
        layout = model_layout(subject.kept, num_blocks=num_blocks, **how)
        self.buffers = [torch.full((m.length,), 0xAB, dtype=torch.uint8) for m in layout.memories]
        self.layout = with_addresses(layout, [b.data_ptr() for b in self.buffers])
        self.registration = register_memory(self.layout, tuple(self.buffers))

    def tensors(self) -> Iterator[tuple[int, View, Part, torch.Tensor]]:
        """Yield every part as a tensor `[block, (token,) (unit,) dims ...]`, with the number of its layer."""
        for view in self.layout.views:
            for part in view.parts:
                names = ["token", part.axis, *(d.name for d in part.dims)]
                dims = {d.name: d for d in part.dims}
                order = [dims[n] for n in dict.fromkeys(names) if n in dims]
                whole = self.buffers[view.memory].view(torch.float32)
                size = (self.layout.groups[view.group].num_kernel_blocks, *(d.size for d in order))
                stride = (view.stride // 4, *(d.stride // 4 for d in order))
                at = (view.offset + part.offset) // 4
                yield int(view.layer.split(".")[1]), view, part, whole.as_strided(size, stride, at)


class Rank(Pages):
    """One rank's paged memory and its engine."""

    def __init__(self, subject: Subject, role: str, tp_rank: int, numbers: Numbers) -> None:
        tp, block_size, order, conv_order = numbers.side(role)
        super().__init__(
            subject, tp_rank=tp_rank, tp_size=tp, block_size=block_size, order=order, conv_order=conv_order
        )
        self.engine = Engine(EngineConfig(engine_id=role), self.registration)


def lists(subject: Subject, numbers: Numbers, role: str, tokens: int) -> list[tuple[int, list[int | None]]]:
    """Return scattered blocks for the request in every group, as an engine's allocator would choose them."""
    _, size, _, _ = numbers.side(role)
    out: list[tuple[int, list[int | None]]] = []
    for group, (layer, _) in enumerate(model_groups(subject.kept)):
        generator = torch.Generator().manual_seed(100 * group + len(role))
        ids = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
        if isinstance(layer, State):
            out.append((0, ids[:1]))
            continue
        gone = max(0, tokens - layer.window + 1) // size if layer.window and role == "prefill" else 0
        out.append((0, [None if i < gone else ids[i] for i in range(-(-tokens // size))]))
    return out


def store(rank: Pages, apart: list[dict[str, torch.Tensor]], blocks: BlockIds, tokens: int) -> None:
    """Write a rank's share of the cache into its pages."""
    for number, view, part, tensor in rank.tensors():
        value = apart[number][part.name]
        cut = slice(*part.held) if part.axis else slice(None)
        group, ids = rank.layout.groups[view.group], blocks[view.group][1]
        if group.kind == "state":
            tensor[ids[0]] = value[cut]
            continue
        for place, token in enumerate(range(tokens - len(value), tokens)):
            row = value[place]
            tensor[ids[token // group.block_size], token % group.block_size] = row[cut] if part.axis else row


def read(
    rank: Pages, subject: Subject, blocks: BlockIds, tokens: int
) -> Iterator[tuple[int, View, Part, torch.Tensor, int]]:
    """Yield every part with its layer's number, its values in a rank's pages, and the dimension of its units."""
    for number, view, part, tensor in rank.tensors():
        group, ids = rank.layout.groups[view.group], blocks[view.group][1]
        layer = subject.kept.layers[number]
        if isinstance(layer, State):
            yield number, view, part, tensor[ids[0]], 0
            continue
        first = max(0, tokens - layer.window + 1) if layer.window else 0
        value = torch.stack([tensor[ids[t // group.block_size], t % group.block_size] for t in range(first, tokens)])
        yield number, view, part, value, 1


def gather(ranks: Sequence[Pages], subject: Subject, blocks: BlockIds, tokens: int) -> list[dict[str, torch.Tensor]]:
    """Read all ranks' pages and join their shares."""
    out: list[dict[str, torch.Tensor]] = [{} for _ in subject.kept.layers]
    for rank in ranks:
        for number, _, part, value, axis in read(rank, subject, blocks, tokens):
            if not part.axis:
                out[number][part.name] = value
                continue
            if part.name not in out[number]:
                shape = list(value.shape)
                shape[axis] = part.extent
                out[number][part.name] = torch.full(shape, float("nan"))
            out[number][part.name].narrow(axis, part.held[0], part.held[1] - part.held[0]).copy_(value)
    return out


def differing(
    ranks: list[Rank], subject: Subject, wanted: list[dict[str, torch.Tensor]], blocks: BlockIds, tokens: int
) -> list[str]:
    """Compare every part of every rank, replicas too, with its share of a single process's cache."""
    out = []
    for rank in ranks:
        for number, view, part, got, axis in read(rank, subject, blocks, tokens):
            want = wanted[number][part.name]
            if part.axis:
                want = want.narrow(axis, part.held[0], part.held[1] - part.held[0])
            if not torch.equal(got, want):
                out.append(f"tp{rank.layout.tp_rank} {view.layer} {part.name}")
    return out


class Guard:
    """Checks which blocks the second pull writes.

    Between the pulls the cached prefix is overwritten by one mark, and the rest of its last block by another. Without
    the marks, a prefix that is read again or a rest that is skipped would look right.
    """

    KEPT, GONE = -7.25, 13.5

    def __init__(self, ranks: list[Rank], full: list[bool], blocks: list[tuple[int, list[int | None]]], cached: int):
        self.saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.blocks = blocks
        for rank in ranks:
            for _, view, _, tensor in rank.tensors():
                size = rank.layout.groups[view.group].block_size
                for place, block in enumerate(blocks[view.group][1][: -(-cached // size)] if full[view.group] else ()):
                    count = min(cached - place * size, size)
                    kept = tensor[block, :count]
                    self.saved.append((kept, kept.clone()))
                    kept.fill_(self.KEPT)
                    tensor[block, count:].fill_(self.GONE)

    def check(self, ranks: list[Rank], subject: Subject, tokens: int) -> list[str]:
        """Return descriptions of wrong writes, and restore the prefix."""
        out = []
        if not all(bool((kept == self.KEPT).all()) for kept, _ in self.saved):
            out.append("the cached prefix was written again")
        for kept, before in self.saved:
            kept.copy_(before)
        for rank in ranks:
            for number, view, part, tensor in rank.tensors():
                layer, group = subject.kept.layers[number], rank.layout.groups[view.group]
                ids = self.blocks[view.group][1]
                ours = set(ids[:1]) if group.kind == "state" else set(ids)
                if isinstance(layer, Heads) and layer.window:
                    ours = set(ids[max(0, tokens - layer.window) // group.block_size :])
                others = torch.tensor([b for b in range(len(tensor)) if b not in ours])
                if not bool((tensor[others].contiguous().view(torch.uint8) == 0xAB).all()):
                    out.append(f"tp{rank.layout.tp_rank} {view.layer} {part.name}: blocks of others were written")
        return out


# -- the two processes ----------------------------------------------------------------------------------------


class Prefill:
    """The process that prefills families, lends each twice, and waits until all ranks have read."""

    def __init__(self, **numbers: int) -> None:
        torch.set_num_threads(1)
        configure_logging("error")
        self._numbers = Numbers(**numbers)
        self._causes: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()

    async def prefill(self, family: str) -> AsyncIterator[dict[str, Any]]:
        """Prefill and lend a family; yield the data that a reader needs."""
        numbers = self._numbers
        causes = self._causes = asyncio.get_running_loop().create_future()
        subject = Subject(family, numbers.seed)
        tokens = numbers.prompt_tokens
        logits, cache = subject.step(prompt(numbers))
        blocks = lists(subject, numbers, "prefill", tokens)
        ranks = [Rank(subject, "prefill", r, numbers) for r in range(numbers.prefill_tp)]
        apart = subject.take_apart(cache, tokens)
        for rank in ranks:
            store(rank, apart, blocks, tokens)
        async with contextlib.AsyncExitStack() as stack:
            for rank in ranks:
                await stack.enter_async_context(rank.engine)
            group = PrefillRanks("prefill", [rank.engine.endpoint for rank in ranks])
            params = [group.make_params(f"{family}-P{i}", blocks, tokens, written=True) for i in range(2)]
            lent = [rank.engine.lend(each) for each in params for rank in ranks]
            yield {"params": params, "first": int(logits.argmax())}
            ends = [await each.wait_released() for each in lent]
        causes.set_result(sorted({end.cause for end in ends}))

    async def causes(self) -> list[str]:
        """Wait until all ranks have read, and return how the leases ended."""
        return await self._causes


async def decode_family(
    family: str, numbers: Numbers, lender: Process, spoil: Callable[[list[Rank]], None] = lambda ranks: None
) -> dict[str, Any]:
    """Pull a family's cache, continue generating, and compare with a single process."""
    subject = Subject(family, numbers.seed)
    tokens, cached = numbers.prompt_tokens, numbers.cached_tokens
    told = await lender.ask("prefill", HEAR_S, family=family)
    ranks = [Rank(subject, "decode", r, numbers) for r in range(numbers.decode_tp)]
    blocks = lists(subject, numbers, "decode", tokens)
    size = numbers.block_size
    # Pull the prefix of the full-attention layers first, then everything else, as if an earlier request had shared the
    # prefix. States and windows belong to the last tokens, so they have no shared prefix.
    full = [not isinstance(layer, State) and not layer.window for layer, _ in model_groups(subject.kept)]
    before = [(0, ids[: -(-cached // size)] if x else []) for x, (_, ids) in zip(full, blocks, strict=True)]
    after = [(cached, ids[cached // size :]) if x else (0, ids) for x, (_, ids) in zip(full, blocks, strict=True)]
    async with contextlib.AsyncExitStack() as stack:
        for rank in ranks:
            await stack.enter_async_context(rank.engine)
        first = [await r.engine.pull("prefix", before, told["params"][0], num_tokens=cached) for r in ranks]
        guard = Guard(ranks, full, blocks, cached)
        rest = [await r.engine.pull("rest", after, told["params"][1]) for r in ranks]
        moved = [(a.num_bytes, b.num_bytes) for a, b in zip(first, rest, strict=True)]
        causes = await lender.ask("causes", HEAR_S)
        stray = guard.check(ranks, subject, tokens)
        spoil(ranks)
        found = gather(ranks, subject, blocks, tokens)

    logits, alone = subject.step(prompt(numbers))
    wanted = subject.take_apart(alone, tokens)
    differ = differing(ranks, subject, wanted, blocks, tokens)
    want_logits, want_tokens = subject.generate(logits, alone, tokens, numbers.new_tokens)

    def again(parts: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, list[int]]:
        cache = subject.put_together(parts, tokens)
        return subject.generate(
            torch.nn.functional.one_hot(torch.tensor([told["first"]]), 128), cache, tokens, numbers.new_tokens
        )

    got_logits, got_tokens = again([{k: v.clone() for k, v in layer.items()} for layer in found])
    controls = {}
    for number, name in [(i, name) for i, layer in enumerate(wanted) for name in layer]:
        zeroed = [{k: v.clone() for k, v in layer.items()} for layer in wanted]
        zeroed[number][name].zero_()
        controls[f"{number}.{name}"] = not torch.equal(again(zeroed)[0], want_logits)
    return {
        "family": family,
        "prefill_tp": numbers.prefill_tp,
        "decode_tp": numbers.decode_tp,
        "bytes_of_prefix_and_rest_per_rank": moved,
        "tensors_compared": sum(1 for rank in ranks for _ in rank.tensors()),
        "tensors_equal": not differ,
        "differing": differ,
        "written_beside": stray,
        "logits_equal": torch.equal(got_logits, want_logits),
        "tokens": got_tokens,
        "tokens_equal": got_tokens == want_tokens,
        "controls_see": controls,
        "leases": causes,
    }


def is_good(row: dict[str, Any]) -> bool:
    """Return True if everything is equal, every control differs, and every block was given back."""
    return (
        row["tensors_equal"]
        and not row["written_beside"]
        and row["logits_equal"]
        and row["tokens_equal"]
        and all(row["controls_see"].values())
        and row["leases"] == ["released"]
    )


async def decode_process(
    families: list[str], numbers: Numbers, spoil: Callable[[list[Rank]], None] = lambda ranks: None
) -> bool:
    """Start the prefill process, and judge each family.

    Args:
        families: Families to run.
        numbers: Numbers for both processes.
        spoil: For tests of the comparison: called with all ranks when everything has arrived.
    """
    good = True
    async with Fleet() as fleet:
        lender = await fleet.start("prefill", "scripts.disagg_generate:Prefill", **msgspec.to_builtins(numbers))
        try:
            for family in families:
                row = await decode_family(family, numbers, lender, spoil)
                good &= is_good(row)
                print(json.dumps(row), flush=True)
            await lender.end()
        except Failure as exc:
            raise Failure("\n".join([str(exc), *lender.last_words()])) from exc
    return good


def generate(
    families: Annotated[list[str] | None, typer.Argument(help=f"From {', '.join(FAMILIES)}; by default all.")] = None,
    prefill_tp: Annotated[int, typer.Option(help="Ranks of the prefill engine (a divisor of 6).")] = 3,
    decode_tp: Annotated[int, typer.Option(help="Ranks of the decode engine (a divisor of 6).")] = 2,
    prefill_block_size: Annotated[int, typer.Option(min=1, help="Tokens per block of the prefill engine.")] = 12,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block of the decode engine.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 45,
    cached_tokens: Annotated[int, typer.Option(help="Tokens that are pulled first, as a prefix.")] = 21,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate after the transfer.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of weights and prompt.")] = 0,
) -> int:
    """Prefill real models in one process and decode them in another; every tensor and logit must be equal bit by bit.

    Each model is a small, randomly initialised Hugging Face model. Its KV cache and states are sharded over
    tensor-parallel ranks into paged memory, moved by asynckv to the ranks of a decode engine of another size (in two
    pulls: a prefix, then the rest), and gathered there; then generation continues. A single process is the reference.
    """
    numbers = Numbers(
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        new_tokens=new_tokens,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        prefill_block_size=prefill_block_size,
        block_size=block_size,
        seed=seed,
    )
    names = command.chosen(families, FAMILIES, "family")
    for option, value in (("--prefill-tp", prefill_tp), ("--decode-tp", decode_tp)):
        command.check(value in (1, 2, 3, 6), f"{option} {value} is none of 1, 2, 3, 6: the models have 6 KV heads")
    command.check(
        0 <= cached_tokens < prompt_tokens,
        f"--cached-tokens {cached_tokens} is outside 0 ... {prompt_tokens - 1}, less than the prompt",
    )
    least = min(block_size, prefill_block_size)
    command.check(
        -(-prompt_tokens // least) <= NUM_BLOCKS,
        f"--prompt-tokens {prompt_tokens} need more than {NUM_BLOCKS} blocks of {least} tokens",
    )
    torch.set_num_threads(1)
    load()
    configure_logging("error")
    try:
        return 0 if asyncio.run(decode_process(names, numbers)) else 1
    except Failure as exc:
        print(f"disagg_generate: {exc}", file=sys.stderr)
        return 1


EPILOG = """
[bold]Controls[/bold]  prove that the comparison works: with any part of any layer set to zero, the logits must differ

[bold]Examples[/bold]

  python -m scripts.disagg_generate llama

  python -m scripts.disagg_generate --prefill-tp 6 --decode-tp 1 | jq .logits_equal

[bold]Exit status[/bold]  0 all equal, 1 a difference, 2 bad input, 130 Ctrl-C
"""
main = command.script(generate, EPILOG)


if __name__ == "__main__":
    sys.exit(main())
