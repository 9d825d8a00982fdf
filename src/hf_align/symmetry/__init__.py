"""From a graph to the symmetries of its weights, and the proof that there are no others."""
