"""A connector that sends each request to `AsyncKVConnector` or to vLLM's own `NixlConnector`, by its params.

An engine with it reads from prefill engines of either connector (`docs/vllm.md`). It derives from vLLM's
`MultiConnector`, but each of the two gets the handshake of its own workers, and only one of them knows a request.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from asynckv.arguments import did_you_mean, shown
from asynckv.config import check_choice
from asynckv.core.types import sendable
from asynckv.errors import ConfigError
from asynckv.integrations.vllm.compat import KVConnectorHandshakeMetadata, KVTransferConfig, MultiConnector
from asynckv.integrations.vllm.connector import AsyncKVConnector
from asynckv.integrations.vllm.options import WHERE, mapping
from asynckv.integrations.vllm.scheduler import FOLLOW, LENDS, PARAMS, READS

SECTIONS = ("asynckv", "nixl")  # the options of the two connectors, in the order of `_connectors`
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Size = Annotated[int, msgspec.Meta(ge=1, le=65535)]
logger = logging.getLogger("vllm.asynckv")


class NixlParams(msgspec.Struct):
    """The checked params that `NixlConnector` gets, because junk in one of them would end the engine."""

    remote_block_ids: list[list[Natural]]
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: Size
    remote_num_tokens: Natural
    tp_size: Size = 1
    dcp_size: Size = 1
    pp_size: Size = 1
    remote_registration_generation: Natural = 0
    remote_blocks_expiry_time: float | None = None


@dataclasses.dataclass
class BothHandshakes(KVConnectorHandshakeMetadata):
    parts: tuple[KVConnectorHandshakeMetadata | None, ...]


class DualConnector(MultiConnector):
    """Reads from prefill engines of either connector, and lends as one of them (`"lend_as"`)."""

    _cache_hit_source = AsyncKVConnector._cache_hit_source

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        given = vllm_config.kv_transfer_config
        config = copy.copy(vllm_config)
        config.kv_transfer_config = expanded(given)
        super().__init__(config, role, kv_cache_config)
        given.kv_role = self._connectors[0]._kv_transfer_config.kv_role  # ours may have widened it to read
        self._lender = SECTIONS.index(given.kv_connector_extra_config.get("lend_as", "asynckv"))
        self._nixl = self._connectors[1].connector_scheduler  # None in a worker

    @classmethod
    def _get_connector_classes_and_configs(cls, vllm_config: Any) -> Any:
        config = copy.copy(vllm_config)
        config.kv_transfer_config = expanded(vllm_config.kv_transfer_config)
        return super()._get_connector_classes_and_configs(config)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return bool(super().supports_sleep_mode(expanded(kv_transfer_config)))

    def on_new_request(self, request: Any) -> None:
        self._requests_to_connector[request.request_id] = self._choose(request)
        self._of(request).on_new_request(request)

    def _choose(self, request: Any) -> int:
        given = request.kv_transfer_params
        if not isinstance(given, dict) or PARAMS in given or FOLLOW in given:
            return 0
        if not given.get(READS) or (given[READS] is not True and given.get(LENDS)):
            if not given.get(LENDS) or not self._lender:
                return 0
            request.kv_transfer_params = {"do_remote_decode": True}
            return 1
        try:
            params = sendable(given, NixlParams)
            self._check(params, request.num_prompt_tokens)
        except (msgspec.ValidationError, ConfigError) as exc:
            name = shown(request.request_id)
            logger.warning("asynckv: the params of request %s are not NixlConnector's either: %s", name, exc)
            return 0
        request.kv_transfer_params = {"do_remote_prefill": True, **msgspec.structs.asdict(params)}
        self._connectors[0]._scheduler.count(request, has_params=True)
        self._connectors[0]._scheduler.tally.ends_row()
        return 1

    def _check(self, params: NixlParams, num_prompt_tokens: int) -> None:
        """Refuse params that cover less than `NixlConnector` will read, because that would end the engine."""
        reads, own = self._nixl._get_remote_prefill_token_count(num_prompt_tokens), self._connectors[0]._scheduler.shape
        lent, groups = params.remote_num_tokens, params.remote_block_ids
        if lent < reads:
            raise ConfigError(f"`remote_num_tokens` is {lent}, but {reads} tokens of the prompt are to be read")
        if len(groups) != len(own.groups):
            raise ConfigError(f"`remote_block_ids` has {len(groups)} groups, but this engine has {len(own.groups)}")
        for ids, group, window in zip(groups, own.groups, self._nixl.blocks_per_sw, strict=True):
            least = 1 if group.is_state else min(-(-reads // group.block_size), window or reads)
            if len(ids) < least:
                raise ConfigError(f"a group of `remote_block_ids` has {len(ids)} blocks, but {least} are to be read")

    def _of(self, request: Any) -> Any:
        return self._connectors[self._requests_to_connector.get(request.request_id, 0)]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        matched: tuple[int | None, bool] = self._of(request).get_num_new_matched_tokens(request, num_computed_tokens)
        return matched

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._of(request).update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: Any, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (blocks,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        finished: tuple[bool, dict[str, Any] | None] = self._of(request).request_finished_all_groups(request, block_ids)
        self._requests_to_connector.pop(request.request_id, None)
        return finished

    def get_handshake_metadata(self) -> BothHandshakes:
        return BothHandshakes(tuple(each.get_handshake_metadata() for each in self._connectors))

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], BothHandshakes]) -> None:
        for i, each in enumerate(self._connectors):
            own = {place: both.parts[i] for place, both in metadata.items() if both.parts[i] is not None}
            each.set_xfer_handshake_metadata_pp_aware(own)


def expanded(given: KVTransferConfig) -> KVTransferConfig:
    """Return the configuration as that of a `MultiConnector`; raise `ConfigError` with the remedy if it is wrong."""
    extra = given.kv_connector_extra_config
    if given.kv_connector == MultiConnector.__name__:
        return given  # already expanded
    if strange := [name for name in extra if name not in (*SECTIONS, "lend_as")]:
        raise ConfigError(
            f"{WHERE} of DualConnector has no option {shown(strange[0])}; it takes asynckv (the options of "
            f"AsyncKVConnector), nixl (those of NixlConnector), and lend_as{did_you_mean(strange[0], SECTIONS)}"
        )
    options = [mapping(f"{WHERE}.{name}", extra.get(name, {})) for name in SECTIONS]
    check_choice(f"{WHERE}.lend_as", extra.get("lend_as", "asynckv"), *SECTIONS)
    common = {f.name: getattr(given, f.name) for f in dataclasses.fields(given) if f.name != "engine_id"}
    both = (AsyncKVConnector.__name__, "asynckv.integrations.vllm"), ("NixlConnector", None)
    connectors = [
        common | {"kv_connector": name, "kv_connector_module_path": module, "kv_connector_extra_config": own}
        for (name, module), own in zip(both, options, strict=True)
    ]
    extra = {"connectors": connectors}
    return dataclasses.replace(given, kv_connector=MultiConnector.__name__, kv_connector_extra_config=extra)
