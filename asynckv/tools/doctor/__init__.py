"""What is wrong with this host, and with the way to another one.

Facts are gathered (`host`, `software`, `probing`, `peer`), each in a place of its own and with a deadline; nothing is
judged there. Checks (`checks`, `checks_ucx`, `checks_peer`) look at facts and say what they find: pure functions, so
that each is tested by facts that provoke it and by facts that do not. All findings that there can be stand in one
catalogue (`catalogue`), with why they matter and what to do.

What UCX really chose nobody can know by looking at the machine: two processes of our own (`probe`) move bytes by the
engine's own NIXL code, and UCX's log of that is read (`ucx_log`). They may hang, or die inside UCX: that is a finding,
too.
"""
