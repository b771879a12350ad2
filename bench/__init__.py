"""What a measurement is, and how it is made (measured) or predicted (simulated)."""
