"""`asynckv proxy`: a small router of prefill and decode engines for OpenAI's clients.

Only `cli` is loaded without the extra `proxy`.
"""
