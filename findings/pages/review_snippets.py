"""Write the labelled texts of trained-classifier: `python findings/pages/review_snippets.py hutto_ICWSM_2014 snippets`.

Snippets of movie reviews, rated by 20 people, from the folder `additional_resources` of vaderSentiment 3.3.2 on PyPI (source
distribution, MIT); Hutto and Gilbert 2014. Those rated between -0.5 and 0.5 on average are left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

NEUTRAL = 0.5
TEST = 1000


def write_snippets(source: Path, out: Path) -> None:
    """Write train.jsonl and test.jsonl, in a fixed random order."""
    labels: dict[str, str] = {}
    ratings = (source / "movieReviewSnippets_GroundTruth.txt").read_text(encoding="utf-8", errors="replace")
    for line in ratings.splitlines():
        _, rating, text = line.split("\t", 2)
        if abs(float(rating)) >= NEUTRAL:
            labels.setdefault(text.strip(), "positive" if float(rating) > 0 else "negative")
    texts = sorted(labels)
    Random(0).shuffle(texts)
    out.mkdir(parents=True, exist_ok=True)
    for name, part in (("test", texts[:TEST]), ("train", texts[TEST:])):
        rows = (json.dumps({"text": text, "label": labels[text]}) for text in part)
        (out / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write snippets of movie reviews with their labels.")
    parser.add_argument("source", type=Path, help="the folder hutto_ICWSM_2014")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    write_snippets(arguments.source, arguments.out)
