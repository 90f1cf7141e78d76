"""Observation of engines: structured logs, metrics and traces, made from the core's histories."""
