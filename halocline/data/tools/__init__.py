"""What is done to data before training: statistics, other formats, advice."""
