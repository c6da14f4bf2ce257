"""Training runs: settings, steps, checkpoints."""
