"""`asynckv layout` and `asynckv plan`: who reads what from whom, before anything runs.

Models and their layouts (`models`, `layouts`) are what the benchmark makes its memory of, too.
"""
