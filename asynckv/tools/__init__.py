"""The commands of `asynckv`: what an engine does (`bench`), did (`diagnose`), would do (`plan`) and what hinders it.

Each folder answers one kind of question; modules beside them are what several share. The engine imports none of them.
"""
