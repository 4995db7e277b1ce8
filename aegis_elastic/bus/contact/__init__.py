"""contact."""
