from asynckv.integrations.vllm.offload.spec import AsyncKVOffloadingSpec as AsyncKVOffloadingSpec

__all__: list[str]
