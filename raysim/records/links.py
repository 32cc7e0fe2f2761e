"""Links of replicas that have other compressors, told apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def with_replicas(links: pd.DataFrame) -> pd.DataFrame:
    """Return rows of `links` of runs of one setting, with a column `replicas` that is "" where replicas share a codec.

    Where the replicas of a link have several codecs it names the replicas of this row's codec. Null names of tensors become "".

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
    for _, rows in known.groupby(link):
        for codec, mine in rows.groupby("codec"):
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
