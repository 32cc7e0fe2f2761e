"""Claims of papers on compressed training, tested on recorded runs: `verdicts.findings` and the command `raysim findings`."""
