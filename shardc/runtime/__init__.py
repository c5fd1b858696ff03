"""Running programs: all ranks simulated in one process, or one process a rank."""
