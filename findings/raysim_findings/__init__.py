"""Claims of papers on compressed training, tested on recorded runs, and races replayed on them."""
