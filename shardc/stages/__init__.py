"""Pipelines: stages, schedules as data, the instruction list of each rank, its proof and its timeline."""
