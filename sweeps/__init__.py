"""Ray Tune and Optuna over the settings of raysim: spaces, studies and their runner."""
