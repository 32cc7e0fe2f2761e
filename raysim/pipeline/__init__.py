"""A pipeline's stages, the workers that own them, and the links between them."""
