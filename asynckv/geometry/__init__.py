"""Geometry: the mapping of the bytes of prefill ranks to the bytes of decode ranks (`docs/geometry.md`).

Geometry is pure: it knows no messages, leases, clocks or NIXL, and imports only `errors` and `arguments`. A layout or a
list of blocks may come from an untrusted peer, so every cost is bounded before it arises.
"""
