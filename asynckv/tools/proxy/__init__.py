"""`asynckv proxy`: a small router of prefill and decode engines for OpenAI's clients.

`cli` reads the options; it alone is loaded without the extra `proxy`. `router` carries a request through its attempts,
`engines` knows which engines are up and what their answers mean, `sources` where engines are found, `server` is the
HTTP server, and `traces` the router's part of a trace.
"""
