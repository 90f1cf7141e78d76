"""`asynckv bench`: prefill and decode workers that move KV, with every byte verified (`docs/bench.md`)."""
