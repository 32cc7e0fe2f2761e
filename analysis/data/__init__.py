"""Records of runs and studies as pandas frames."""
