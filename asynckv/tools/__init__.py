"""The commands of `asynckv`. Each folder answers one kind of question; modules beside them are what several share."""
