"""The pure core: geometry, planning, messages and state machines.

Nothing in here reads a clock, touches a socket, logs or awaits. Everything takes events and `now`
(seconds, float, any epoch that only moves forward) and returns or queues commands.
`tests/test_imports.py` enforces which modules may be imported.
"""
