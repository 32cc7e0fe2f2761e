"""Tables of seconds and bytes for a person to read, and the same figures for JSON."""
