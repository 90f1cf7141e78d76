from asynckv.integrations.vllm.connector import AsyncKVConnector as AsyncKVConnector
from asynckv.integrations.vllm.dual import DualConnector as DualConnector

__all__: list[str]
