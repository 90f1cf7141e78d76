"""`asynckv layout` and `asynckv plan`, and the models and layouts that the benchmark uses as well."""
