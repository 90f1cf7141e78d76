"""`asynckv proxy`: a small router between OpenAI clients and prefill and decode engines.

Only `cli` can be imported without the extra `proxy`.
"""
