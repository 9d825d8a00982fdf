"""What the groups do not hold: ways to write one function with several weights, and which of them is canonical."""
