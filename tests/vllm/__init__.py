"""asynckv inside the real vLLM: its own tests with the connector exchanged, and two engines that compare every byte.

Run by `tox run -e vllm`, in an environment of its own. The main suite does not collect this folder.
"""
