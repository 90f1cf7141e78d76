from asynckv.edges.torch import TensorPart as TensorPart
from asynckv.edges.torch import register_parts as register_parts
from asynckv.geometry.check import register_memory as register_memory
from asynckv.geometry.layout import ONE_PER_REQUEST as ONE_PER_REQUEST
from asynckv.geometry.layout import Dim as Dim
from asynckv.geometry.layout import Group as Group
from asynckv.geometry.layout import Layout as Layout
from asynckv.geometry.layout import Memory as Memory
from asynckv.geometry.layout import Part as Part
from asynckv.geometry.layout import TokenShard as TokenShard
from asynckv.geometry.layout import View as View
from asynckv.geometry.layout import attention_view as attention_view
from asynckv.geometry.layout import dense_part as dense_part

__all__: list[str]
