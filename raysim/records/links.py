"""Rows of `links.parquet`: the replicas of a codec, and averages that send more than uncompressed ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysim.network.exchanges import more_than_dense

if TYPE_CHECKING:
    import pandas as pd


def with_replicas(links: pd.DataFrame) -> pd.DataFrame:
    """Return rows of `links` of runs of one setting, with a column `replicas`: the replicas of the row's codec, or "" if all share it.

    Null names of tensors become "".

    >>> import pandas as pd
    >>> links = pd.DataFrame({"direction": "forward", "boundary": 0, "replica": [0, 1, 2], "codec": ["A", "B", "A"]})
    >>> with_replicas(links)["replicas"].tolist()
    ['replicas 0, 2', 'replica 1', 'replicas 0, 2']
    """
    links = links.assign(tensor=links["tensor"].astype(object).fillna("") if "tensor" in links else "")
    link = ["direction", "boundary", "tensor"]
    named = links["boundary"].notna() & links["replica"].notna()
    known = links.loc[named, [*link, "replica", "codec"]].drop_duplicates()
    names = {}
    for _, rows in known.groupby(link, observed=True):
        for codec, mine in rows.groupby("codec", observed=True):
            replicas = sorted(mine["replica"].tolist())
            if len(mine) < len(rows):
                text = f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, replicas))}"
                names[rows["direction"].iloc[0], int(rows["boundary"].iloc[0]), rows["tensor"].iloc[0], codec] = text
    if not names:
        return links.assign(replicas="")
    columns = zip(
        links["direction"], links["boundary"].fillna(-1).astype(int), links["tensor"], links["codec"], strict=True
    )
    return links.assign(replicas=[names.get(key, "") for key in columns])


def exceeds_dense(links: pd.DataFrame, num_replicas: int) -> str | None:
    """Return a sentence if replicas send more than an uncompressed all-reduce of their gradients would, else None."""
    averages = links[(links["direction"] == "replica_gradient") & (links["dense_bytes"] > 0)]
    if averages.empty:
        return None
    most = averages.iloc[int((averages["wire_bytes"] / averages["dense_bytes"]).to_numpy().argmax())]
    return more_than_dense(str(most["codec"]), float(most["wire_bytes"]), float(most["dense_bytes"]), num_replicas)
