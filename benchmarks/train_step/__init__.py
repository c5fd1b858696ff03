"""The training-step benchmark: `python -m benchmarks.train_step --help`."""
