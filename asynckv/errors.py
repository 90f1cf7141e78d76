"""The errors that asynckv raises. Each class names the side at fault, and its bases the reach of the damage."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any


class AsyncKVError(Exception):
    """Base of every error that asynckv raises on purpose."""


class ConfigError(AsyncKVError):
    """The configuration is wrong, and nothing was started; the message names the value and the remedy."""


class LayoutError(ConfigError):
    """The declared memory is inconsistent (bounds, overlap, counts); nothing was started."""


class ProtocolError(AsyncKVError):
    """A caller or a peer broke the rules; base of the two errors that name the side."""


class LocalProtocolError(ProtocolError):
    """A call on this side came out of order, or with an invalid argument; nothing was changed."""


class WrongThread(LocalProtocolError):
    """An engine was called from another thread or event loop than its own; nothing was changed."""


class RemoteProtocolError(ProtocolError):
    """The other side sent something malformed; it was dropped."""


class BlocksRetired(AsyncKVError):
    """Blocks of a failed pull are lost to this process: a transfer that does not end may still write them.

    Never use them again before the process ends.
    """


class EngineClosed(AsyncKVError):
    """The engine is closed, draining or suspended, and takes no new work."""


class BackendError(AsyncKVError):
    """A back end (NIXL, ZMQ, a disk) failed during start-up or shutdown."""


class PullError(AsyncKVError):
    """One pull failed.

    Attributes:
        request_id: The caller's id of the request.
        pull_id: This attempt's id, as in the logs.
        reason: The cause for programs, one of the values of `asynckv.core.types.Reason`; stable, as in the logs.
        held: Group index to local block ids that must not be reused yet. Empty if every block is the caller's again.
        is_retryable: True if another attempt with the same params may succeed.
        attempts: Number of attempts that were made.
        failed_in: Phase in which it failed: `follow`, `announced`, `handshake`, `queue`, `plan`, `read`, `confirm`;
            `retry` between two attempts; `store` or `load` of an offload; empty if nothing was started.
    """

    def __init__(
        self,
        message: str,
        *,
        request_id: str = "",
        pull_id: str = "",
        reason: str = "",
        held: Mapping[int, tuple[int, ...]] | None = None,
        wait_returned: Callable[[], Awaitable[None]] | None = None,
        is_retryable: bool = False,
        attempts: int = 1,
        failed_in: str = "",
    ) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.pull_id = pull_id
        self.reason = reason
        self.held: Mapping[int, tuple[int, ...]] = dict(held or {})
        self.is_retryable = is_retryable
        self.attempts = attempts
        self.failed_in = failed_in
        self._wait_returned = wait_returned

    async def returned(self) -> None:
        """Wait until every block of the failed pull is the caller's again.

        This may take arbitrarily long, because NIXL cannot cancel a transfer: blocks come back only when it is certain
        that nothing can write them any more.

        Raises:
            BlocksRetired: A transfer did not end within `held_s`; the blocks must never be used again.
        """
        if self._wait_returned is not None:
            await self._wait_returned()

    def __reduce__(self) -> tuple[Any, ...]:
        names = ("request_id", "pull_id", "reason", "is_retryable", "attempts", "failed_in")
        fields = {name: getattr(self, name) for name in names}
        return partial(type(self), str(self), held=dict(self.held), **fields), ()


class Overloaded(PullError):
    """Too many requests wait already; nothing was started. Try later, or elsewhere."""


class PlanRefused(PullError):
    """The request cannot be planned on these layouts; nothing was posted."""


class RemoteTooShort(PlanRefused):
    """The prefill side offers fewer tokens than this side asks for; nothing was posted."""


class GeometryRefused(PullError):
    """The two engines' layouts differ in something that cannot be planned around."""


class PeerUnreachable(PullError):
    """The remote rank did not complete a handshake within its deadline."""


class PeerLost(PullError):
    """The remote rank died, restarted under another incarnation, or said goodbye."""


class NoOffer(PullError):
    """A request that followed a ticket was not offered in time, or the prefill side ended it (`reason`)."""


class LeaseRefused(PullError):
    """The prefill side refused the claim: the blocks are not, or no longer, lent to this reader."""


class LeaseLost(PullError):
    """Bytes arrived, but no lease provably covered the read; they must not be used."""


class ReadFailed(PullError):
    """A NIXL transfer failed."""


class BytesDiffer(PullError):
    """A second look found other bytes than the read: the owner wrote into lent blocks, or a transport changed them.
    Prefill the request anew, or compute it.
    """


class PullTimeout(PullError):
    """The caller's deadline passed first."""


class NotLentYet(PullTimeout):
    """The deadline passed, and by the prefill side's last answer the request was not lent yet."""


class PullCancelled(PullError):
    """The pull, store or load was cancelled, by `cancel` or by an engine that closes or is suspended."""
