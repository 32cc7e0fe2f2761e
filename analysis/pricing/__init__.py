"""Step times of recorded runs on other networks, from one compute profile per job."""
