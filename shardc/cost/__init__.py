"""What one rank's body costs, read off the graph alone: nothing is run and no tensor is made."""
