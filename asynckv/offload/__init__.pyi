from asynckv.config import OffloadConfig as OffloadConfig
from asynckv.embed.orders import Load as Load
from asynckv.embed.orders import Lookup as Lookup
from asynckv.embed.orders import Store as Store
from asynckv.offload.found import Found as Found
from asynckv.results import Evicted as Evicted
from asynckv.results import Loaded as Loaded
from asynckv.results import Stored as Stored
from asynckv.tiers.offload import Offload as Offload

__all__: list[str]
