"""asynckv as a KV connector of vLLM: `"kv_connector_module_path": "asynckv.integrations.vllm"`.

vLLM makes the same class in the scheduler's process and in every worker's, and sends plain values from the scheduler to
the workers once per step (`handover`). The scheduler's half (`scheduler`) decides which blocks hold a request's KV. The
workers' half (`worker`, `memory`, `stats`) moves it. `connector` has the class, `dual` combines it with vLLM's
`NixlConnector`, and `options` parses the user's options.

vLLM is imported only when the class is imported, so the rest can be tested without it.
"""

from __future__ import annotations

from asynckv.public import lazily

__all__, __getattr__ = lazily(__name__)
