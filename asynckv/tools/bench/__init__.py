"""`asynckv bench`: prefill and decode workers on one host, every byte verified.

The parent (`driver`) is the scheduler: it knows lengths and block ids and measures nothing itself. Each
rank is a process of its own (`worker`) with an engine and a pool of KV blocks. See `docs/bench.md`.
"""
