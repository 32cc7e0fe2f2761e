"""One stage on one worker, the engines that drive them, and the run around it."""
