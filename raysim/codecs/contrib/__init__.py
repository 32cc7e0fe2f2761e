"""Codecs that no recipe or study uses: as exact and as tested as the others, kept apart so that the core stays short."""
