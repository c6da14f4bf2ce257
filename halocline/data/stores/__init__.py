"""Stores: samples of which any box is read straight into a given array."""
