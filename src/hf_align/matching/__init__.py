"""Finding the element of each group that brings B closest to A, generic over the spec."""
