"""Choose specs and submit them; no measurement logic."""
