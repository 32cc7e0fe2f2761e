"""Files, folders and locks; folders in buckets and packs are read like local ones."""
