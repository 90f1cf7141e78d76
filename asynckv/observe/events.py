"""The names of all events, in one place: what logs say, what readers of logs look for, what `docs/events.md` lists.

A name is what an event is called for ever: dashboards and the readers of old logs go by it. Fields may be added;
one that is there keeps its meaning.
"""

from __future__ import annotations

import enum

__all__ = ["EVENT"]


class EVENT(enum.StrEnum):
    """What may be logged."""

    ENGINE_STARTED = "engine_started"
    ENGINE_STOPPED = "engine_stopped"
    ENGINE_SUSPENDED = "engine_suspended"
    ENGINE_RESUMED = "engine_resumed"
    ENGINE_CLOSED_WITH_STRAGGLERS = "engine_closed_with_stragglers"
    DRAINED = "drained"
    DRAIN_INCOMPLETE = "drain_incomplete"
    # the network
    PEER_CHANGED = "peer_changed"
    PEER_DRAINING = "peer_draining"
    READER_MET = "reader_met"
    READER_REFUSED = "reader_refused"
    REFUSED = "refused"
    # a prefill side's requests
    LEASE_LENT = "lease_lent"
    LEASE_GRANTED = "lease_granted"
    LEASE_HELD = "lease_held"
    LEASE_ENDED = "lease_ended"
    LEASE_TRANSITION = "lease_transition"
    REQUEST_WITHDRAWN = "request_withdrawn"
    # a decode side's
    PULL_HELD = "pull_held"
    PULL_RETRIED = "pull_retried"
    PULL_ENDED = "pull_ended"
    PULL_TRANSITION = "pull_transition"
    RELEASE_REFUSED = "release_refused"
    RELEASE_UNANSWERED = "release_unanswered"
    BLOCKS_RETURNED = "blocks_returned"
    BLOCKS_RETIRED = "blocks_retired"
    # the process
    LOOP_WAS_AWAY = "loop_was_away"
    INTERNAL_ERROR = "internal_error"
    SLOW_GEOMETRY = "slow_geometry"
    TABLE_REFUSED = "table_refused"
    DATA_PLANE_RESTARTED = "data_plane_restarted"
    DATA_PLANE_BROKEN = "data_plane_broken"
    DATA_PLANE_IN_PROCESS = "data_plane_in_process"
