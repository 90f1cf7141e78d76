from asynckv.embed.desk import EngineDesk as EngineDesk
from asynckv.embed.ledgers import DecodeLedger as DecodeLedger
from asynckv.embed.ledgers import PrefillLedger as PrefillLedger
from asynckv.embed.orders import Announce as Announce
from asynckv.embed.orders import Cancel as Cancel
from asynckv.embed.orders import EndPieces as EndPieces
from asynckv.embed.orders import Failed as Failed
from asynckv.embed.orders import Finished as Finished
from asynckv.embed.orders import Follow as Follow
from asynckv.embed.orders import Lend as Lend
from asynckv.embed.orders import LendPiece as LendPiece
from asynckv.embed.orders import Load as Load
from asynckv.embed.orders import Lookup as Lookup
from asynckv.embed.orders import Offer as Offer
from asynckv.embed.orders import Order as Order
from asynckv.embed.orders import Pull as Pull
from asynckv.embed.orders import Reclaim as Reclaim
from asynckv.embed.orders import Refused as Refused
from asynckv.embed.orders import StartEarly as StartEarly
from asynckv.embed.orders import Store as Store
from asynckv.embed.orders import Withdraw as Withdraw
from asynckv.embed.orders import WithdrawTicket as WithdrawTicket
from asynckv.embed.thread import EngineThread as EngineThread

__all__: list[str]
