"""What the runtime itself costs, by the task graphs of Task Bench."""
