"""Batches that are cut over a mesh, prepared ahead of the steps that need them."""
