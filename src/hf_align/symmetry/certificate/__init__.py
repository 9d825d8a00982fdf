"""The proof that derived symmetries are sound and complete, by a random copy in float64."""
