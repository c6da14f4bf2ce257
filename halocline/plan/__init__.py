"""Which cut, what it costs, and why: a recorded step priced on a described machine, before a run starts."""
