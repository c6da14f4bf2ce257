"""Tools for data before training: statistics, conversion, advice on chunks."""
