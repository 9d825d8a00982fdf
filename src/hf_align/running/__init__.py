"""An architecture as a function of its weights: where it runs, what it loses, and inputs where there is no data."""
