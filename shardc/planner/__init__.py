"""Which plan a model should have on a machine: placements from the graph, by predicted time under a bound of memory."""
