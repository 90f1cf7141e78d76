"""Answers to questions about a rank, for people and tools: what it holds and owes, and what that waits for, in words.

Everything here reads the core and changes nothing in it. The engine makes it; the core knows nothing of it.
"""
