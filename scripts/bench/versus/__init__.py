"""The two sides of `scripts.bench.vs_vllm`: the same workload through asynckv and through vLLM's own connector."""
