"""Named run files: `raysim train NAME`. A recipe may derive from another by `base`."""
