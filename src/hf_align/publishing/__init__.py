"""What a merge says of itself: model card, report, provenance, and the way to the Hub."""
