"""From a config to a graph of one forward pass, and small copies of an architecture to try things on."""
