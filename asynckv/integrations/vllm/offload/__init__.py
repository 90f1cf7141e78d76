"""asynckv as a spec of vLLM's `OffloadingConnector`: blocks go to host memory and to files, and come back from there.

vLLM makes the spec in the scheduler's process for the manager, which keeps the catalogue, and in every worker for the
half that moves bytes. A manager can give workers only vLLM's own jobs, so the bytes go two ways:

    workers      device <---> host memory     for vLLM's jobs, by the copy plane
    scheduler    host memory <---> files      for moves of the catalogue, by the record plane

Host memory is one region that all processes of an engine map (`region`); each rank has a part of every slot. A file's
record is a whole slot, so there is one directory and one index. vLLM is imported only with the class.
"""

from __future__ import annotations

from asynckv.public import lazily

__all__, __getattr__ = lazily(__name__)
