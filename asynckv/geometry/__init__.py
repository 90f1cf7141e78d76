"""Geometry: which bytes of which prefill rank belong into which bytes of which decode rank (`docs/geometry.md`).

Geometry is pure: it knows no messages, leases, clocks or NIXL, and imports only `errors` and `arguments`. A layout or a
list of blocks may come from a stranger, so costs are bounded before they arise.
"""
