"""Measurements: what the library costs, and how much of it can be hidden. Timings live here, never in tests."""
