"""How sums travel: flat or round rings, in which precision, and the threads that carry them."""
