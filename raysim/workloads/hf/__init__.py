"""Hugging Face models as chains of layers that a pipeline can cut."""
