"""When sums begin and when they are waited for."""
