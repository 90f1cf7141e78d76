"""Faults of this host, and of the path to another one.

Facts are gathered (`host`, `software`, `probing`, `peer`), each with a deadline, and nothing is judged there. Checks
(`checks`, `checks_ucx`, `checks_peer`) are pure functions of facts. `catalogue` has all findings that there can be.

UCX's choices cannot be known by looking at the machine, so two processes (`probe`) move bytes by the engine's own
NIXL code, and UCX's log of that is read (`ucx_log`). If they hang, or die inside UCX, that is a finding, too.
"""
