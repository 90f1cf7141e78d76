"""An operator's question, answered from logs, by running engines, or both: why does this not move, or did not?

What `asynckv why` concludes is pure: records and answers go in, findings come out.
"""
