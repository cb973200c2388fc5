"""The loop that trains many replicas at once, and what it stands on."""
