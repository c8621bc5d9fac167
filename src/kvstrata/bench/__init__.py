"""What `kvstrata bench` measures: workloads, the tiers below them, and one module per measurement. `cli` prints it."""
