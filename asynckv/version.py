"""The version of asynckv: what logs, metrics, answers to questions and the built packages say.

It is stated here and nowhere else. The code that runs says it of itself: the metadata of an installed package may be
another copy's, where this one lies in a folder on PYTHONPATH.
"""

from __future__ import annotations

VERSION = "0.7.0"
