"""Files, folders and their locks; folders in buckets and packs, read as local ones."""
